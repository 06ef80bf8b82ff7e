"""What segments (``checkpoint_sequential``) bring to a search: two searches of one question, one of them without.

    OMP_NUM_THREADS=1 python -m tests.evidence.segments BUDGET FILE.json [HARDWARE]

A tower of 48 residual layers with a bottleneck, 512 units wide and 128 inside, on 2048 rows, in fp32 on one thread,
without an optimizer and without offloading. A layer keeps a quarter of what it passes on, so recomputing every layer by
itself frees a fifth, and a budget slightly above that leaves most layers recomputed where segments are not allowed.
Both searches may measure the same number of trials; then the two plans found take turns, step by step, until the 95 %
interval of the ratio of their step times is within ± 0.5 % or 20 rounds are done. Processor seconds of a search are
those of its measuring process, too.

With HARDWARE (the name of a described card) nothing is measured: both are dry runs of a ResNet of 50 bottlenecks (that
of ResNet-152, a quarter as wide) on sixteen images of 224 × 224, and peaks and seconds are what they predict.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.statistics import judge
from autockpt.schema import Choice, SearchOutcome, SearchRequest, WorkloadSpec, parse_budget
from autockpt.schema.choices import searched_kinds
from autockpt.shipped import load_hardware, load_space
from autockpt.tuning import run_search
from tests.evidence.until import compare_until

CONFIG = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "embedding_size": 16,
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [3, 8, 36, 3],
    "layer_type": "bottleneck",
    "num_labels": 10,
    "image_size": 224,
}
LAYERS, WIDTH, INSIDE, ROWS = 48, 512, 128, 2048
TRIALS = 8
WITHOUT = tuple(k for k in searched_kinds() if k != "segment" and "offload" not in k)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(torch.tanh(self.down(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def tower() -> dict[str, Any]:
    """The workload that is measured."""
    torch.manual_seed(0)
    return {
        "model": Tower(),
        "batch": torch.randn(ROWS, WIDTH),
        "loss": lambda model, rows: model(rows).square().mean(),
    }


def searched(spec: WorkloadSpec, budget: str, kinds: tuple[str, ...], out: Path) -> tuple[SearchOutcome, float]:
    """A search, and the processor seconds that it took with its children."""
    space = load_space("knobs").restricted(kinds)
    request = SearchRequest(
        budget=parse_budget(budget), workload=spec, space=space, device="cpu", trials=TRIALS, out=out
    )
    before = sum(os.times()[:4])
    outcome = run_search(request)
    return outcome, sum(os.times()[:4]) - before


def foreseen(budget: str, hardware: str, target: Path) -> None:
    """Two dry runs for a card that is not at hand; what came of them goes to ``target``."""
    told: dict[str, Any] = {"budget": budget, "simulated for": hardware}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "deep-resnet.json"
        config.write_text(json.dumps(CONFIG))
        spec = WorkloadSpec(model=str(config), batch_size=16)
        for name, kinds in (("without", WITHOUT), ("with", (*WITHOUT, "segment"))):
            request = SearchRequest(
                budget=parse_budget(budget),
                workload=spec,
                space=load_space("knobs").restricted(kinds),
                hardware=load_hardware(hardware),
                dry_run=True,
            )
            before = sum(os.times()[:4])
            outcome = run_search(request)
            assert outcome.plan is not None and outcome.plan.predicted is not None
            plan = outcome.plan.expand(outcome.plan.model.classes)
            told[name] = {
                "processor seconds": round(sum(os.times()[:4]) - before, 1),
                "plan": "".join(choice.letter for choice in plan.values()),
                "simulated peak bytes": outcome.plan.predicted.peak_bytes,
                "simulated step seconds": outcome.plan.predicted.step_seconds,
            }
            print(name, told[name], flush=True)
    target.write_text(json.dumps(told, indent=1) + "\n")


def main(budget: str, target: Path) -> None:
    """Both searches and the comparison; what came of them goes to ``target``."""
    with tempfile.TemporaryDirectory() as folder:
        spec = WorkloadSpec(model="tests.evidence.segments:tower", optimizer="none")
        found: dict[str, dict[str, Choice]] = {}
        told: dict[str, Any] = {"budget": budget, "trials": TRIALS, "torch": torch.__version__}
        # the first search fills the cache of op times for both, so a short one goes first and is not counted
        searched(spec, "100%", ("save", "recompute"), Path(folder) / "warm")
        for name, kinds in (("without", WITHOUT), ("with", (*WITHOUT, "segment"))):
            outcome, seconds = searched(spec, budget, kinds, Path(folder) / name)
            assert outcome.plan is not None
            found[name] = outcome.plan.expand(outcome.plan.model.classes)
            told[name] = {
                "processor seconds": round(seconds, 1),
                "measured trials": outcome.measured_trials,
                "stopped": outcome.stopped,
                "plan": "".join(choice.letter for choice in found[name].values()),
            }
            print(name, told[name], flush=True)
        with WorkerMeasurer(spec, "cpu") as worker:
            for name, plan in found.items():
                told[name]["peak bytes"] = worker.measure(plan, steps=1).peak_bytes

            def draw(rounds: int) -> tuple[list[float], list[float]]:
                times = worker.compare(found, rounds=rounds)
                return times["with"], times["without"]

            pair = compare_until(draw, at_most=20)
        told |= {"step with / without": str(pair.ratio), "rounds": pair.rounds, "verdict": judge(pair.ratio)}
    print(told)
    target.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        foreseen(sys.argv[1], sys.argv[3], Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
