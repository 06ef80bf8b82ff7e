"""Micro-batch and plan found together, against the enumerated optimum of both.

    OMP_NUM_THREADS=1 nice python -m tests.evidence.batches results/batches_cpu_202611

Three tiny workloads (a Llama, a GPT-2, a vision transformer) of four layers, 16 rows per update, one thread of a CPU.
The budget is a little more than what micro-batches of 8 take with every layer recomputed. ``autockpt.search`` looks
for micro-batch and plan with at most 20 measured trials, all plans that it measures counted; every micro-batch that
divides 16, with every assignment of save and recompute to the layers, is measured besides. The minimum of a hundred
noisy numbers is too small, so the fastest eight that fit are measured again, interleaved, and the best of these is the
optimum. The answer is then held against it, against the best plan at micro-batch 1, and against the largest micro-
batch with everything recomputed, in interleaved pairs of whole updates until the 95 % interval of the ratio is
% or 30 pairs are done.

Appends a line for each workload to ``cpu.jsonl``, and writes ``README.md`` from it. About two minutes a workload.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from autockpt.devices import get_device
from autockpt.measuring import StepRunner, environment_of
from autockpt.measuring.statistics import Interval
from autockpt.schema import RECOMPUTE, SAVE, Choice, Silence
from autockpt.schema.runs import RunDirectory
from autockpt.shipped import load_space
from autockpt.tuning.batches import search_batch_sizes
from autockpt.tuning.door import search_request
from autockpt.tuning.jobs import with_rows
from autockpt.workload import Step, discover_units
from tests.evidence.until import compare_until

ROWS, LAYERS, SIZES = 16, 4, (1, 2, 4, 8, 16)
TRIALS, SECONDS = 8, 75.0
"""Candidates and seconds of a search; the well-known plans that it measures at each size come on top of the first."""
_USUAL = "largest micro-batch, all recomputed"
FASTEST, PAIRS = 8, int(os.environ.get("PAIRS", "30"))


class Setting(NamedTuple):
    """A micro-batch, and what each layer does: a letter each, S or R."""

    size: int
    letters: str

    def __str__(self) -> str:
        return f"{self.size} × {ROWS // self.size} {self.letters}"


def llama() -> Step:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return of_tokens(transformers.LlamaForCausalLM(config), 48)


def gpt2() -> Step:
    config = transformers.GPT2Config(
        vocab_size=256,
        n_embd=64,
        n_layer=LAYERS,
        n_head=4,
        n_positions=64,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return of_tokens(transformers.GPT2LMHeadModel(config), 32)


def vision() -> Step:
    config = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=48,
        patch_size=8,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config).train()
    batch = {"pixel_values": torch.randn(ROWS, 3, 48, 48), "labels": torch.randint(0, 10, (ROWS,))}
    return Step(model, batch, optimizer=torch.optim.AdamW(model.parameters()))


def of_tokens(model: Any, length: int) -> Step:
    ids = torch.randint(0, 256, (ROWS, length))
    return Step(model.train(), {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()))


WORKLOADS: dict[str, Callable[[], Step]] = {"llama": llama, "gpt2": gpt2, "vision": vision}


class Bench:
    """Whole updates of a workload under any setting, all on the one model."""

    def __init__(self, step: Step) -> None:
        self.device = get_device("cpu")
        self.blocks = [unit.name for unit in discover_units(step.model) if unit.role == "block"]
        steps = {size: with_rows(step, size, ROWS // size) for size in SIZES}
        self.runners = {size: StepRunner(made, self.device) for size, made in steps.items() if made is not None}
        assert len(self.blocks) == LAYERS and len(self.runners) == len(SIZES)

    def choices(self, setting: Setting) -> dict[str, Choice]:
        return {n: RECOMPUTE if c == "R" else SAVE for n, c in zip(self.blocks, setting.letters, strict=True)}

    def measured(self, setting: Setting) -> tuple[int, float]:
        """Peak bytes and seconds of an update."""
        found = self.runners[setting.size].measure(self.choices(setting), steps=1)
        return found.peak_bytes, found.step_seconds

    def interleaved(self, settings: Sequence[Setting], rounds: int) -> list[list[float]]:
        """Seconds of an update under each, one after another in every round, every second round the other way."""
        times = [list[float]() for _ in settings]
        for number in range(rounds):
            for at in range(len(settings))[:: 1 if number % 2 else -1]:
                runner, choices = self.runners[settings[at].size], self.choices(settings[at])
                times[at] += runner.compare({"": choices}, rounds=1)[""]
        return times

    def enumerated(self, budget: int) -> dict[Setting, float]:
        """Seconds of every setting that fits; a size that does not fit with everything recomputed has none."""
        fitting: dict[Setting, float] = {}
        for size in SIZES:
            if self.measured(Setting(size, "R" * LAYERS))[0] > budget:
                break
            for letters in map("".join, itertools.product("SR", repeat=LAYERS)):
                peak, seconds = self.measured(setting := Setting(size, letters))
                if peak <= budget:
                    fitting[setting] = seconds
        return fitting

    def fastest(self, fitting: dict[Setting, float]) -> Setting:
        """The one with the least median of those that look fastest, measured again."""
        best = sorted(fitting, key=lambda setting: fitting[setting])[:FASTEST]
        times = self.interleaved(best, 9)
        return min(zip(best, times, strict=True), key=lambda pair: statistics.median(pair[1]))[0]

    def ratio(self, ours: Setting, other: Setting) -> Interval:
        """How many times as long our update takes, with its 95 % interval; exactly once as long as itself."""
        if ours == other:
            return Interval(1.0, 1.0, 1.0)

        def draw(rounds: int) -> tuple[list[float], list[float]]:
            one, two = self.interleaved([ours, other], rounds)
            return one, two

        return compare_until(draw, at_most=PAIRS).ratio


def case(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    step = WORKLOADS[name]()
    bench = Bench(step)
    budget = round(1.05 * bench.measured(Setting(8, "R" * LAYERS))[0]) // 1000 * 1000
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        answer = search_batch_sizes(
            search_request(
                step=step,
                global_batch=ROWS,
                budget=f"{budget // 1000}KB",
                trials=TRIALS,
                timeout=SECONDS,
                space=load_space("knobs").restricted(("save", "recompute")),
                out=out,
            ),
            Silence(),
        )
        runs = [RunDirectory.open(path) for path in sorted(Path(out).iterdir())]
        spent = sum(trial.measured is not None for run in runs for trial in run.trials())
    seconds, plan = time.monotonic() - began, answer.outcome.plan
    print(f"{name}: searched for {seconds:.0f} s, {spent} measured trials", flush=True)
    assert plan is not None
    chosen = plan.expand(plan.model.classes)
    ours = Setting(answer.best.batch_size, "".join("SR"[chosen[n] != SAVE] for n in bench.blocks))
    began = time.monotonic()
    fitting = bench.enumerated(budget)
    print(f"{name}: {len(fitting)} settings fit, measured in {time.monotonic() - began:.0f} s", flush=True)
    optimum = bench.fastest(fitting)
    single = bench.fastest({s: t for s, t in fitting.items() if s.size == 1})
    usual = Setting(max(s.size for s in fitting), "R" * LAYERS)
    found: dict[str, Any] = {
        "workload": name,
        "budget": budget,
        "ours": str(ours),
        "fits": ours in fitting,
        "trials": spent,
        "candidates": answer.trials,
        "search_seconds": round(seconds, 1),
        "settings_that_fit": len(fitting),
        "enumeration_seconds": round(time.monotonic() - began, 1),
    }
    for against, other in (("optimum", optimum), ("single", single), ("usual", usual)):
        ratio = bench.ratio(ours, other)
        found[against] = {"setting": str(other), "ratio": ratio.value, "interval": [ratio.low, ratio.high]}
    return found


def page(lines: Sequence[dict[str, Any]]) -> str:
    environment = environment_of(get_device("cpu"))
    first = lines[0]

    def cell(found: dict[str, Any]) -> str:
        (low, high), ratio = found["interval"], found["ratio"]
        return f"{found['setting']}: {ratio:.3f} [{low:.3f}, {high:.3f}]"

    rows = [
        f"| {line['workload']} | {line['ours']} | {line['trials']} | "
        f"{cell(line['optimum'])} | {cell(line['single'])} | {cell(line['usual'])} |"
        for line in lines
    ]
    optimum = [line["optimum"]["interval"] for line in lines]
    others = [line[against]["interval"] for line in lines for against in ("single", "usual")]
    said = [
        f"Surely within 1 % of the optimum: {sum(high < 1.01 for _, high in optimum)} of {len(optimum)}; "
        f"surely more than 1 % slower: {sum(low > 1.01 for low, _ in optimum)}.",
        f"Surely at least 10 % more per second than micro-batch 1, or than everything recomputed: "
        f"{sum(high < 1 / 1.1 for _, high in others)} of {len(others)}.",
        f"Measured trials of a search: at most {max(line['trials'] for line in lines)}.",
        f"Answers that held the budget when they were measured again: {sum(line['fits'] for line in lines)} of "
        f"{len(lines)}.",
    ]
    loads = [line["load"] for line in lines]
    about = (
        f"What was done is in that program's first lines. Settings are micro-batch × accumulation and what the {LAYERS}"
        " layers do (S save, R recompute). Figures are how many times as long the found setting's update takes, with "
        "the 95 % interval of interleaved pairs: below 1 the found one is faster. `cpu.jsonl` has every figure."
    )
    head = ("workload", "found", "measured trials", "optimum of all that fit", "best at micro-batch 1", _USUAL)
    return "\n".join(
        [
            "# Micro-batch and plan found together, against the enumerated optimum",
            "",
            f"One thread of {environment.device.name}, torch {torch.__version__}, {first['date']}, commit",
            f"{first['commit']}, load average {min(loads)} to {max(loads)}:",
            "",
            "    OMP_NUM_THREADS=1 nice python -m tests.evidence.batches results/batches_cpu_202611",
            "",
            *textwrap.wrap(about, 120),
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
            *rows,
            "",
            *(f"- {line}" for line in said),
            "",
        ]
    )


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cpu.jsonl"
    made = {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
    for name in names or list(WORKLOADS):
        found = case(name) | made | {"load": round(os.getloadavg()[0], 1)}
        with file.open("a") as out:
            out.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)
    newest = {line["workload"]: line for line in map(json.loads, file.read_text().splitlines())}
    (folder / "README.md").write_text(page(list(newest.values())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
