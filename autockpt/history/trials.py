"""What a list of trials says: the best, the ranking and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from autockpt.schema.trial import Measurement, Trial

UNKNOWN = float("inf")
T = TypeVar("T")


def peak_bytes(trial: Trial) -> int | None:
    """Peak in bytes: measured where a measurement exists, else predicted, else None."""
    known = trial.measured or trial.predicted
    return None if known is None else known.peak_bytes


def step_seconds(trial: Trial) -> float | None:
    """Seconds of one cycle: measured where a measurement exists, else predicted, else None."""
    known = trial.measured or trial.predicted
    return None if known is None else known.step_seconds


def _or_last(value: float | None) -> float:
    return UNKNOWN if value is None else value


SORT_KEYS: dict[str, Callable[[Trial], tuple[float, ...]]] = {
    "number": lambda t: (t.number,),
    "time": lambda t: (not t.feasible, t.score_seconds, _or_last(step_seconds(t)), t.number),
    "peak": lambda t: (_or_last(peak_bytes(t)), t.number),
    "predicted": lambda t: (_or_last(t.predicted.step_seconds if t.predicted else None), t.number),
}


def ranked(trials: Sequence[Trial], by: str = "time") -> list[Trial]:
    """Trials in order of one of ``SORT_KEYS``; unknown numbers last. Raises KeyError for another key.

    ``time`` puts those that fit before those that do not, and measured times before predicted ones.
    """
    return sorted(trials, key=SORT_KEYS[by])


def best(trials: Sequence[Trial], count: int = 1) -> list[Trial]:
    """The ``count`` fastest plans that were measured (or simulated) and fit, fastest first."""
    fitting = [t for t in trials if t.feasible and t.score is not None]
    return ranked(fitting)[:count]


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Measured (or simulated) plans that no other is both leaner and faster than, leanest first.

    Over the budget or not: the front shows what another budget would buy. Of plans with equal numbers the first stays.
    """
    known = sorted((t for t in trials if t.score is not None), key=lambda t: t.number)
    return undominated(known, lambda t: (_or_last(peak_bytes(t)), t.score_seconds))


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
    found: list[Measurement] = []
    for trial in readings:
        if trial.measured is not None and (not found or found[-1] != trial.measured):
            found.append(trial.measured)
    return found
