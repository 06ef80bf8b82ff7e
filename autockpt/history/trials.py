"""What a list of trials says: the best, the ranking and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from autockpt.schema.trial import Measurement, Prediction, Trial

T = TypeVar("T")


def _figure(reading: Measurement | Prediction | None, name: str) -> float:
    """Bytes or seconds of a reading; infinite where they are not known."""
    value = getattr(reading, name, None)
    return math.inf if value is None else value


SORT_KEYS: dict[str, Callable[[Trial], tuple[float, ...]]] = {
    "number": lambda t: (t.number,),
    "time": lambda t: (not t.feasible, t.score_seconds, _figure(t.measured or t.predicted, "step_seconds"), t.number),
    "peak": lambda t: (_figure(t.measured or t.predicted, "peak_bytes"), t.number),
    "predicted": lambda t: (_figure(t.predicted, "step_seconds"), t.number),
}


def ranked(trials: Sequence[Trial], by: str = "time") -> list[Trial]:
    """Trials in order of one of ``SORT_KEYS``; unknown numbers last. Raises KeyError for another key.

    ``time`` puts those that fit before those that do not, and measured times before predicted ones.
    """
    return sorted(trials, key=SORT_KEYS[by])


def best(trials: Sequence[Trial], count: int = 1) -> list[Trial]:
    """The ``count`` fastest plans that were measured (or simulated) and fit, fastest first."""
    return ranked([t for t in trials if t.feasible and t.score is not None])[:count]


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Measured (or simulated) plans that no other is both leaner and faster than, leanest first.

    Over the budget or not: the front shows what another budget would buy. Of plans with equal numbers the first stays.
    """
    known = sorted((t for t in trials if t.score is not None), key=lambda t: t.number)
    return undominated(known, lambda t: (_figure(t.score, "peak_bytes"), t.score_seconds))


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
