"""What a list of trials says: the best and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from autockpt.schema.trial import Measurement, Trial

T = TypeVar("T")


def best(trials: Sequence[Trial], count: int = 1) -> list[Trial]:
    """The ``count`` fastest plans that were measured (or simulated) and fit, fastest first."""
    fitting = (t for t in trials if t.feasible and t.score is not None)
    return sorted(fitting, key=lambda t: (t.score_seconds, t.number))[:count]


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Measured (or simulated) plans that no other is both leaner and faster than, leanest first.

    Over the budget or not: the front shows what another budget would buy. Of plans with equal numbers the first stays.
    """
    known = sorted((t for t in trials if t.score is not None), key=lambda t: t.number)
    return undominated(known, lambda t: (t.score.peak_bytes if t.score else math.inf, t.score_seconds))


def undominated(items: Iterable[T], cost: Callable[[T], tuple[float, float]]) -> list[T]:
    """Items that no other beats in bytes or seconds (their ``cost``) without losing in the other, leanest first.

    Of equal ones the first.
    """
    kept: list[T] = []
    for item in sorted(items, key=cost):
        if not kept or cost(item)[1] < cost(kept[-1])[1]:
            kept.append(item)
    return kept


def measurements(readings: Sequence[Trial]) -> list[Measurement]:
    """The different measurements among a trial's lines: it is written again, too, when it is judged."""
    return [measured for measured, _ in groupby(t.measured for t in readings if t.measured is not None)]
