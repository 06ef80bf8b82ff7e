"""Predicted against real steps on the CPU: peak bytes and overhead over save-everything, for thirteen plans a model.

    python results/foresight_cpu_202611/bench.py

Peaks come from ghost runs, seconds from op times measured once per model while every unit is recomputed. Real steps are
interleaved, their order rotating; the overhead is the median of the rounds' ratios to save-everything.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

from autockpt.measuring import WorkerMeasurer
from autockpt.profiling import build_profile, measure_op_times, uniform_graphs
from autockpt.schema import RECOMPUTE, SAVE, Choice, WorkloadSpec, parse_choice, searched_kinds
from autockpt.tracing import Tracer

ROUNDS = 9
RANDOM_PLANS = 10
KINDS = searched_kinds()
HERE = Path(__file__).parent
CASES = {
    "llama, AdamW": WorkloadSpec(model="llama-small", batch_size=3),
    "llama, AdamW, accumulate 2": WorkloadSpec(model="llama-small", batch_size=2, accumulate=2),
    "gpt2 (dropout), AdamW": WorkloadSpec(model=str(HERE / "gpt2.json"), batch_size=3, seq_len=256),
    "bert (dropout), SGD, clipping": WorkloadSpec(
        model=str(HERE / "bert.json"), batch_size=4, seq_len=256, optimizer="sgd", max_grad_norm=1.0
    ),
    "vit, AdamW": WorkloadSpec(model=str(HERE / "vit.json"), batch_size=5),
    "mixtral, AdamW": WorkloadSpec(model=str(HERE / "mixtral.json"), batch_size=4, seq_len=256),
}


def plans(units: list[str], seed: int) -> dict[str, dict[str, Choice]]:
    """Save all, recompute all, every second, and random mixtures of all choices that a search tries."""
    draw = random.Random(seed)
    named = {
        "save all": dict.fromkeys(units, SAVE),
        "recompute all": dict.fromkeys(units, RECOMPUTE),
        "every second": {u: RECOMPUTE if i % 2 == 0 else SAVE for i, u in enumerate(units)},
    }
    mixed = {f"random {i}": {u: parse_choice(draw.choice(KINDS)) for u in units} for i in range(1, RANDOM_PLANS + 1)}
    return named | mixed


def run_case(title: str, spec: WorkloadSpec) -> list[tuple[float, float]]:
    """Print one model's table; (peak error, overhead error) of each plan, in shares."""
    with WorkerMeasurer(spec, "cpu") as worker, Tracer.from_spec(spec) as tracer:
        units = [u.name for u in tracer.units if u.role == "block"]
        uniform = uniform_graphs(tracer, [u for u in tracer.units if u.role == "block"], KINDS)
        times = measure_op_times(worker, uniform, title, room=worker.environment.device.capacity_bytes)
        predictor = build_profile(tracer, times, uniform).predictor
        chosen = plans(units, seed=7)
        peaks = {name: worker.measure(choices, steps=1).peak_bytes for name, choices in chosen.items()}
        seconds = worker.compare(chosen, rounds=ROUNDS)
        predictions = {name: predictor.predict(choices) for name, choices in chosen.items()}
    plain = predictions["save all"].step_seconds or 0.0
    step = statistics.median(seconds["save all"])
    print(f"\n### {title}: {len(units)} units, measured step {step * 1e3:.0f} ms, predicted {plain * 1e3:.0f} ms\n")
    print("| plan | peak predicted (bytes) | measured | error | overhead predicted | measured | error (points) |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for name, predicted in predictions.items():
        peak = predicted.peak_bytes / peaks[name] - 1
        guess = (predicted.step_seconds or 0.0) / plain - 1
        ratios = [a / b for a, b in zip(seconds[name], seconds["save all"], strict=True)]
        real = statistics.median(ratios) - 1
        errors.append((peak, guess - real))
        print(
            f"| {name} | {predicted.peak_bytes} | {peaks[name]} | {peak:+.3%} "
            f"| {guess:+.1%} | {real:+.1%} | {(guess - real) * 100:+.1f} |",
            flush=True,
        )
    return errors


def main() -> None:
    """All cases, then the summary."""
    only = sys.argv[1:]
    errors = [e for title, spec in CASES.items() if not only or title in only for e in run_case(title, spec)]
    peaks, times = [abs(e[0]) for e in errors], [abs(e[1]) for e in errors]
    print(f"\n{len(errors)} plans: peak error median {statistics.median(peaks):.3%}, worst {max(peaks):.3%};", end=" ")
    print(f"overhead error median {statistics.median(times) * 100:.1f} points, worst {max(times) * 100:.1f}")


if __name__ == "__main__":
    main()
