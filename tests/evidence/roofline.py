"""Steps and overheads that a roofline of a calibrated CPU predicts, against real steps.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=70368744177664 MALLOC_MMAP_THRESHOLD_=33554432 \
        python -m tests.evidence.roofline results/roofline_cpu_202611/epyc.yaml

Nothing of the models is timed for the prediction: it comes from ghost runs and the hardware file alone. Real steps are
interleaved; one thread, and the processor's own time, so that what else runs on the machine is no part of it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from autockpt.cost.roofline import roofline_times
from autockpt.cost.step import simulate
from autockpt.devices.cpu import CpuDevice
from autockpt.measuring.runner import StepRunner
from autockpt.schema import RECOMPUTE, SAVE, Choice, WorkloadSpec, parse_choice
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.workload import build

ROUNDS = 5
SHAPES = Path(__file__).resolve().parents[2] / "results" / "foresight_cpu_202611"
CASES = {
    "llama-tiny": WorkloadSpec(model="llama-tiny"),
    "gpt2-tiny": WorkloadSpec(model="gpt2-tiny"),
    "bert-tiny": WorkloadSpec(model="bert-tiny"),
    "vit-tiny": WorkloadSpec(model="vit-tiny"),
    "llama-small": WorkloadSpec(model="llama-small", batch_size=3),
    "gpt2 (dropout)": WorkloadSpec(model=str(SHAPES / "gpt2.json"), batch_size=3, seq_len=256),
    "bert (dropout), SGD": WorkloadSpec(model=str(SHAPES / "bert.json"), batch_size=4, seq_len=256, optimizer="sgd"),
    "vit": WorkloadSpec(model=str(SHAPES / "vit.json"), batch_size=5),
    "mixtral": WorkloadSpec(model=str(SHAPES / "mixtral.json"), batch_size=4, seq_len=256),
}


class ProcessorTime(CpuDevice):
    """The CPU, with the time that this process had of it."""

    def time(self, fn: Callable[[], None]) -> float:
        start = time.process_time()
        fn()
        return time.process_time() - start


def plans(units: list[str]) -> dict[str, dict[str, Choice]]:
    """Save all, recompute all, every second, offload all."""
    return {
        "save all": dict.fromkeys(units, SAVE),
        "recompute all": dict.fromkeys(units, RECOMPUTE),
        "every second": {u: RECOMPUTE if i % 2 == 0 else SAVE for i, u in enumerate(units)},
        "offload all": dict.fromkeys(units, parse_choice("offload")),
    }


def run_case(title: str, spec: WorkloadSpec, hardware_file: str) -> list[tuple[float, float]]:
    """Print one model's rows; (step error as a share, overhead error) of each plan."""
    with Tracer.from_spec(spec) as tracer:
        chosen = plans([u.name for u in tracer.units if u.role == "block"])
        graphs = {name: tracer.trace(choices) for name, choices in chosen.items()}
    times = roofline_times(load_hardware(hardware_file), graphs.values())
    predicted = {name: simulate(graph, times).step_seconds for name, graph in graphs.items()}
    runner = StepRunner(build(spec, torch.device("cpu")), ProcessorTime())
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(ROUNDS):
        for name, choices in chosen.items():
            with runner.attached(choices):
                runner.run_cycle()
                seconds[name].append(runner.time_cycle())
    runner.close()
    found = []
    for name, guess in predicted.items():
        real = statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[name], seconds["save all"], strict=True)]
        overhead, said = statistics.median(ratios) - 1, guess / predicted["save all"] - 1
        found.append((guess / real - 1, said - overhead))
        print(
            f"| {title} | {name} | {guess * 1e3:.1f} | {real * 1e3:.1f} | {guess / real - 1:+.1%} "
            f"| {said:+.1%} | {overhead:+.1%} | {(said - overhead) * 100:+.1f} |",
            flush=True,
        )
    return found


def main() -> None:
    """All cases, then the summary, apart for models whose steps are mostly Python."""
    hardware_file, *only = sys.argv[1:]
    print("| model | plan | step predicted (ms) | measured | error | overhead predicted | measured | error (points) |")
    print("|---|---|---|---|---|---|---|---|")
    found = {t: run_case(t, spec, hardware_file) for t, spec in CASES.items() if not only or t in only}
    for words, tiny in (("steps of 0.2 s and more", False), ("tiny models, steps of 10 to 30 ms", True)):
        some = [e for title, errors in found.items() if title.endswith("-tiny") == tiny for e in errors]
        if some:
            steps, over = [abs(s) for s, _ in some], [abs(o) * 100 for _, o in some if o]
            print(f"\n{words}: step error median {statistics.median(steps):.1%}, worst {max(steps):.1%};", end=" ")
            print(f"overhead error median {statistics.median(over):.1f} points, worst {max(over):.1f}")


if __name__ == "__main__":
    main()
