"""Predicted against measured peaks of real CPU steps: many architectures, two settings each, six plans each.

    OMP_NUM_THREADS=1 python -m tests.evidence.bytes [ARCHITECTURE ...]

Predictions come from ghost runs of small models (nothing is downloaded, nothing measured enters); measured is the
most that PyTorch's CPU allocator held during a real step of the same plan, counted to the byte by its own events.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from autockpt.errors import AutockptError
from autockpt.measuring import LocalMeasurer
from autockpt.schema import RECOMPUTE, SAVE, Choice, Unit, WorkloadSpec, parse_choice
from autockpt.schema.choices import searched_kinds
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.evidence.architectures import ARCHITECTURES, Setting, settings_of

ROWS, LENGTH, SOUND = 4, 96, 4000
EXPLAIN = 0.005


@dataclass(frozen=True)
class Result:
    """One plan's peaks, in bytes."""

    architecture: str
    setting: str
    plan: str
    predicted: int
    measured: int
    source: str

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def plans(units: tuple[Unit, ...], seed: str) -> dict[str, dict[str, Choice]]:
    """None, all, every second unit, attention alone, and two random mixtures of what a search tries."""
    blocks = [u.name for u in units if u.role == "block"]
    attention = [u.name for u in units if u.role == "attention"]
    draw = random.Random(seed)
    named: dict[str, dict[str, Choice]] = {
        "none": {},
        "all": dict.fromkeys(blocks, RECOMPUTE),
        "every 2nd": {name: RECOMPUTE if i % 2 == 0 else SAVE for i, name in enumerate(blocks)},
    }
    if attention:
        named["attention"] = dict.fromkeys(attention, RECOMPUTE)
    mixed = {f"mix {i}": {u: parse_choice(draw.choice(searched_kinds())) for u in blocks} for i in (1, 2)}
    return named | mixed


def write_config(name: str, folder: Path) -> Path:
    """The small config of an architecture, as a file."""
    cls, values = ARCHITECTURES[name]
    config = AutoConfig.for_model(name, **values)
    config.architectures = [cls]
    path = folder / f"{name}.json"
    config.to_json_file(path, use_diff=False)
    return path


def run_case(name: str, setting: Setting, folder: Path) -> list[Result]:
    """Peaks of six plans on one architecture."""
    length = SOUND if name == "wav2vec2" else 64 if name == "whisper" else LENGTH
    spec = WorkloadSpec(model=str(write_config(name, folder)), batch_size=ROWS, seq_len=length, **setting.spec)
    results = []
    torch.set_num_threads(1)
    with Tracer.from_spec(spec) as tracer, LocalMeasurer(build(spec)) as meter:
        for title, choices in plans(tracer.units, name).items():
            try:
                graph = tracer.trace(choices)
                peak = meter.measure(choices, steps=1).peak_bytes
            except AutockptError as error:
                print(f"{name}, {setting.name}, {title}: {error.message}", file=sys.stderr, flush=True)
                continue
            results.append(Result(name, setting.name, title, graph.peak_bytes, peak or 0, graph.source))
    return results


def main() -> None:
    """All cases, then the summary."""
    chosen = sys.argv[1:] or list(ARCHITECTURES)
    results: list[Result] = []
    print("| architecture | setting | plan | predicted (bytes) | measured | error |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            for setting in settings_of(list(ARCHITECTURES).index(name)):
                try:
                    found = run_case(name, setting, Path(folder))
                except AutockptError as error:
                    print(f"{name}, {setting.name}: {error.message}", file=sys.stderr, flush=True)
                    continue
                results += found
                for r in found:
                    recorded = "" if r.source == "ghost" else " (recorded)"
                    print(
                        f"| {r.architecture} | {r.setting} | {r.plan}{recorded} | {r.predicted} | {r.measured} "
                        f"| {r.error:+.3%} |",
                        flush=True,
                    )
    summary(results)


def summary(results: list[Result]) -> None:
    """Errors over all plans, and the plans whose error asks for an explanation."""
    errors = [abs(r.error) for r in results]
    exact = sum(r.predicted == r.measured for r in results)
    names = {r.architecture for r in results}
    low, high = sum(r.predicted < r.measured for r in results), sum(r.predicted > r.measured for r in results)
    misses = sum(e > EXPLAIN for e in errors)
    print(f"\n{len(results)} plans of {len(names)} architectures: {exact} exact to the byte, {low} low, {high} high;")
    print(f"error median {statistics.median(errors):.4%}, worst {max(errors):.3%}, {misses} above 0.5 %")


if __name__ == "__main__":
    main()
