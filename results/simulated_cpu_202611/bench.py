"""Simulated searches of large models on a machine without an accelerator: how long, how much memory, what plan.

    python results/simulated_cpu_202611/bench.py [CASE …]

Prints one row per case as Markdown. Seconds are wall and CPU seconds of the process tree beyond the imports, which
are done before the clock starts; memory is the largest resident size of any of its processes and the sum of the two
largest (the search itself and the process that holds the ghosts).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "llama-1b": ("rtx4090", "--budget", "12GB"),
    "llama-8b lora": ("rtx4090", "--lora", "16", "--batch-size", "2", "--seq-len", "2048", "--budget", "24GB"),
    "llama-8b": ("b200", "--batch-size", "2", "--budget", "70%act"),
    "llama-70b lora": ("b200", "--lora", "16", "--budget", "170GB"),
    "llama-70b": ("pool.yaml", "--budget", "60%act"),
}
POOL = "llama-70b"  # trained whole it fits no single card: planned for one with the memory of eight

CHILD = """
import json, resource, sys, time
import torch, transformers, optuna, scipy.optimize, scipy.special, peft, rich, typer, yaml, pydantic
import autockpt.tuning, autockpt.report
begin, cpu = time.monotonic(), time.process_time()
sys.argv = ["autockpt", *sys.argv[1:]]
from autockpt.cli.app import build
code = 0
try:
    build()(sys.argv[1:], prog_name="autockpt")
except SystemExit as end:
    code = int(end.code or 0)
me, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = {"wall": time.monotonic() - begin, "cpu": time.process_time() - cpu + children.ru_utime + children.ru_stime}
sizes = {"own": me.ru_maxrss * 1024, "child": children.ru_maxrss * 1024}
print(json.dumps({"code": code, **seconds, **sizes}), file=sys.stderr)
"""


def main(names: list[str]) -> None:
    print("| case | hardware | plan | simulated peak | simulated step | wall s | CPU s | largest process | both |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names or CASES:
        hardware, *options = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            print(row(name, hardware, options, Path(folder)), flush=True)


def row(name: str, hardware: str, options: list[str], folder: Path) -> str:
    where = pool(folder) if name == POOL else hardware
    arguments = ["search", "--model", name.split()[0], "--hardware", where, *options, "--out", str(folder), "--json"]
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    facts = json.loads(done.stderr.splitlines()[-1])
    if facts["code"]:
        return f"| {name} | {hardware} | exit code {facts['code']} | | | {facts['wall']:.1f} | {facts['cpu']:.1f} | | |"
    answer = json.loads(done.stdout)
    predicted, choices = answer["plan"]["predicted"], answer["plan"]["choices"]
    tally = ", ".join(f"{pattern.split('layers.')[-1]} {said(choice)}" for pattern, choice in choices.items())
    sizes = max(facts["own"], facts["child"]), facts["own"] + facts["child"]
    return (
        f"| {name} `{' '.join(options)}` | {hardware} | {tally} | {predicted['peak_bytes'] / 1e9:.1f} GB | "
        f"{predicted['step_seconds']:.3f} s | {facts['wall']:.1f} | {facts['cpu']:.1f} | "
        f"{sizes[0] / 1e9:.2f} GB | {sizes[1] / 1e9:.2f} GB |"
    )


def said(choice: object) -> str:
    return choice["kind"] if isinstance(choice, dict) else str(choice)


def pool(folder: Path) -> str:
    """A description of one b200 with the memory of eight."""
    from search_spaces.hardware import load_hardware

    card = load_hardware("b200")
    import yaml

    data = card.model_dump(mode="json", exclude_defaults=True) | {"name": "pool", "memory_bytes": 8 * card.memory_bytes}
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1:])
