"""Simulated searches of large models on a machine without an accelerator: how long, how much memory, what plan.

    python -m tests.evidence.simulated [CASE …]

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
from collections import Counter
from pathlib import Path

CASES = {
    "llama-1b": ("rtx4090", "--budget", "24GB"),
    "llama-8b lora": ("rtx4090", "--lora", "16", "--batch-size", "2", "--seq-len", "2048", "--budget", "24GB"),
    "llama-8b": ("b200", "--batch-size", "2", "--budget", "70%act"),
    "llama-70b lora": ("b200", "--lora", "16", "--budget", "170GB"),
    "llama-70b": ("b200", "--shard", "8", "--budget", "60%act"),
}
CHILD = """
import json, resource, sys, time
import torch, transformers, optuna, scipy.optimize, scipy.special, peft, rich, typer, yaml, pydantic
import autockpt.tuning
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
    arguments = ["search", "--model", name.split()[0], "--hardware", hardware, *options, "--out", str(folder), "--json"]
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    facts = json.loads(done.stderr.splitlines()[-1])
    if facts["code"]:
        return f"| {name} | {hardware} | exit code {facts['code']} | | | {facts['wall']:.1f} | {facts['cpu']:.1f} | | |"
    answer = json.loads(done.stdout)
    predicted, choices = answer["plan"]["predicted"], answer["plan"]["choices"]
    tally = ", ".join(f"{count} {kind}" for kind, count in tallied(choices).most_common())
    sizes = max(facts["own"], facts["child"]), facts["own"] + facts["child"]
    return (
        f"| {name} `{' '.join(options)}` | {hardware} | {tally} | {predicted['peak_bytes'] / 1e9:.1f} GB | "
        f"{predicted['step_seconds']:.3f} s | {facts['wall']:.1f} | {facts['cpu']:.1f} | "
        f"{sizes[0] / 1e9:.2f} GB | {sizes[1] / 1e9:.2f} GB |"
    )


def tallied(choices: dict[str, object]) -> Counter[str]:
    """Layers by kind of choice, ``model.layers.3-7`` are five; and the output head."""
    kinds: Counter[str] = Counter()
    for pattern, choice in choices.items():
        first, _, last = pattern.rsplit(".", 1)[-1].partition("-")
        count = int(last or first) - int(first) + 1 if first.isdigit() else 1
        kinds[choice["kind"] if isinstance(choice, dict) else str(choice)] += count
    return kinds


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1:])
