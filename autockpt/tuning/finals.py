"""The best few are measured again, interleaved with the baselines, before one is named.

Among many noisy measurements the smallest is too small (the winner's curse): the name goes to the plan that wins when
all contenders run side by side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autockpt.history.statistics import Interval, judge, noise, ratio_interval
from autockpt.schema import Choice, Measurement, Trial

WITHIN = 0.005
BATCH = 3
MOST_ROUNDS = 15

Compare = Callable[[Mapping[str, Mapping[str, Choice]], int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Final:
    """Outcome of the finals. ``times`` are interleaved seconds per trial number; ``undecided`` names close rivals."""

    winner: int
    times: dict[int, list[float]]
    undecided: tuple[int, ...]


def play(candidates: Sequence[Trial], extra: Sequence[Trial], compare: Compare, *, seconds: float) -> Final:
    """Interleave ``candidates`` (one of them wins) and ``extra`` (measured beside them, for the table).

    Rounds go on until every rival's ratio to the leader is known within ± 0.5 % or lies surely above 1, at most
    15 rounds and ``seconds`` of wall time.
    """
    plans = {str(t.number): t.choices for t in (*candidates, *extra)}
    times: dict[int, list[float]] = {int(name): [] for name in plans}
    end = time.monotonic() + seconds
    leader = candidates[0].number
    while True:
        for name, values in compare(plans, BATCH).items():
            times[int(name)].extend(values)
        leader = min((t.number for t in candidates), key=lambda n: statistics.median(times[n]))
        open_rivals = [
            t.number for t in candidates if t.number != leader and _open(_ratio(times[t.number], times[leader]))
        ]
        if not open_rivals or len(times[leader]) >= MOST_ROUNDS or time.monotonic() > end:
            break
    rivals = [t.number for t in candidates if t.number != leader]
    close = tuple(n for n in rivals if judge(_ratio(times[n], times[leader])) != "slower")
    return Final(leader, times, close)


def remeasured(trial: Trial, times: Sequence[float]) -> Measurement:
    """The trial's measurement with the times of the finals in place of its first ones; the peak stands."""
    assert trial.measured is not None
    return trial.measured.model_copy(
        update={
            "step_seconds": statistics.median(times),
            "noise": noise(times),
            "steps": len(times),
            "times": tuple(times),
        }
    )


def _ratio(ours: Sequence[float], base: Sequence[float]) -> Interval:
    return ratio_interval(ours, base, robust=True)


def _open(ratio: Interval) -> bool:
    """Neither surely slower nor known well enough."""
    return judge(ratio) != "slower" and ratio.half_width > WITHIN
