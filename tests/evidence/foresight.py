"""Predicted against real steps on the CPU: peak bytes and overhead over save-everything, for thirteen plans a model.

    python -m tests.evidence.foresight

Peaks come from ghost runs, seconds from op times measured once per model while every unit is recomputed. Real steps are
interleaved, their order rotating; the overhead is the Hodges-Lehmann estimate of the rounds' ratios to save-everything,
with the 95 % interval of the signed-rank test. A prediction is *surely off* where the whole interval lies more than
three points from it.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from autockpt.cost import build_profile, measure_op_times, uniform_graphs
from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.statistics import Interval, ratio_interval
from autockpt.schema import RECOMPUTE, SAVE, Choice, WorkloadSpec, parse_choice
from autockpt.schema.choices import searched_kinds
from autockpt.tracing import Tracer

ROUNDS = 15
RANDOM_PLANS = 10
AIM = 0.03
KINDS = searched_kinds()
HERE = Path(__file__).resolve().parents[2] / "results" / "foresight_cpu_202611"
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


@dataclass(frozen=True)
class Error:
    """How far a prediction is from what was measured: shares of the peak and of save-everything's step time."""

    peak: float
    overhead: float
    measured: Interval

    @property
    def surely_off(self) -> bool:
        """Whether no value within the interval of the measured overhead is within the aim."""
        predicted = self.overhead + self.measured.value
        return predicted < self.measured.low - AIM or predicted > self.measured.high + AIM


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


def run_case(title: str, spec: WorkloadSpec) -> list[Error]:
    """Print one model's table; the errors of its plans."""
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
    head = ("plan", "peak predicted (bytes)", "measured", "error")
    head += ("overhead predicted", "measured", "95 % interval", "error (points)")
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    errors = []
    for name, predicted in predictions.items():
        peak = predicted.peak_bytes / peaks[name] - 1
        guess = (predicted.step_seconds or 0.0) / plain - 1
        ratio = ratio_interval(seconds[name], seconds["save all"])
        real = Interval(ratio.low - 1, ratio.value - 1, ratio.high - 1)
        errors.append(Error(peak, guess - real.value, real))
        print(
            f"| {name} | {predicted.peak_bytes} | {peaks[name]} | {peak:+.3%} | {guess:+.1%} | {real.value:+.1%} "
            f"| {real.low:+.1%} … {real.high:+.1%} | {(guess - real.value) * 100:+.1f} |",
            flush=True,
        )
    return errors


def main() -> None:
    """All cases, then the summary."""
    only = sys.argv[1:]
    errors = [e for title, spec in CASES.items() if not only or title in only for e in run_case(title, spec)]
    peaks, times = [abs(e.peak) for e in errors], [abs(e.overhead) for e in errors]
    print(f"\n{len(errors)} plans: peak error median {statistics.median(peaks):.3%}, worst {max(peaks):.3%};", end=" ")
    print(f"overhead error median {statistics.median(times) * 100:.1f} points, worst {max(times) * 100:.1f};", end=" ")
    print(f"within 3 points {sum(t <= AIM for t in times)}, surely off by more {sum(e.surely_off for e in errors)}")


if __name__ == "__main__":
    main()
