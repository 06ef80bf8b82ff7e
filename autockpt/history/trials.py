"""What a list of trials says: the best, the ranking, the Pareto front, and ours beside the plans everybody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autockpt.schema.trial import Trial, TrialState

UNKNOWN = float("inf")


def peak_bytes(trial: Trial) -> int | None:
    """Peak in bytes: measured where a measurement exists, else predicted, else None."""
    known = trial.measured or trial.predicted
    return None if known is None else known.peak_bytes


def step_seconds(trial: Trial) -> float | None:
    """Seconds of one cycle: measured where a measurement exists, else predicted, else None."""
    known = trial.measured or trial.predicted
    return None if known is None else known.step_seconds


def _measured_seconds(trial: Trial) -> float:
    return UNKNOWN if trial.measured is None else trial.measured.step_seconds


def _or_last(value: float | None) -> float:
    return UNKNOWN if value is None else value


SORT_KEYS: dict[str, Callable[[Trial], tuple[float, ...]]] = {
    "number": lambda t: (t.number,),
    "time": lambda t: (not t.feasible, _measured_seconds(t), _or_last(step_seconds(t)), t.number),
    "peak": lambda t: (_or_last(peak_bytes(t)), t.number),
    "predicted": lambda t: (_or_last(t.predicted.step_seconds if t.predicted else None), t.number),
}


def ranked(trials: Sequence[Trial], by: str = "time") -> list[Trial]:
    """Trials in order of one of ``SORT_KEYS``; unknown numbers last. Raises KeyError for another key.

    ``time`` puts those that fit before those that do not, and measured times before predicted ones.
    """
    return sorted(trials, key=SORT_KEYS[by])


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """One trial per plan, in order of number: the latest measured one, else the latest."""
    by_plan: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda t: t.number):
        known = by_plan.get(trial.plan_hash)
        if known is None or trial.measured is not None or known.measured is None:
            by_plan[trial.plan_hash] = trial
    return sorted(by_plan.values(), key=lambda t: t.number)


def duplicates(trials: Sequence[Trial]) -> dict[str, list[int]]:
    """Numbers of the trials of every plan that was tried more than once, by plan hash."""
    numbers: dict[str, list[int]] = {}
    for trial in trials:
        numbers.setdefault(trial.plan_hash, []).append(trial.number)
    return {plan: sorted(found) for plan, found in numbers.items() if len(found) > 1}


def best(trials: Sequence[Trial], count: int = 1) -> list[Trial]:
    """The ``count`` fastest plans that were measured and fit, fastest first; one trial per plan, the latest."""
    fitting = [t for t in distinct(trials) if t.feasible and t.measured is not None]
    return ranked(fitting)[:count]


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Measured plans that no other is both leaner and faster than, leanest first.

    Over the budget or not: the front shows what another budget would buy. Of plans with equal numbers the first stays.
    """
    front: list[Trial] = []
    known = [t for t in distinct(trials) if t.measured is not None]
    for trial in sorted(known, key=lambda t: (_or_last(peak_bytes(t)), _measured_seconds(t), t.number)):
        if not front or _measured_seconds(trial) < _measured_seconds(front[-1]):
            front.append(trial)
    return front


@dataclass(frozen=True)
class ComparisonRow:
    """One plan beside the others. Bytes and seconds; None where unknown.

    ``peak`` and ``seconds`` are measured where possible, else predicted (``measured`` says which); ``overhead`` is the
    step time over save-everything's as a share, from like numbers: both measured, else both predicted.
    """

    name: str
    number: int
    state: TrialState
    fits: bool
    measured: bool
    peak: int | None
    headroom: int | None
    seconds: float | None
    noise: float | None
    overhead: float | None
    predicted_peak: int | None
    predicted_seconds: float | None


def comparison(
    trials: Sequence[Trial], budget_bytes: int, *, names: Sequence[str], ours: Trial | None = None, base: str = "none"
) -> list[ComparisonRow]:
    """Rows for the trials called ``names``, in that order and where they exist, then for ``ours``.

    ``base`` names the save-everything trial that overheads refer to.
    """
    by_name = {t.name: t for t in reversed(trials)}
    reference = by_name.get(base)
    rows = [_row(by_name[name], name, reference, budget_bytes) for name in names if name in by_name]
    return rows if ours is None else [*rows, _row(ours, "ours", reference, budget_bytes)]


def _row(trial: Trial, name: str, reference: Trial | None, budget_bytes: int) -> ComparisonRow:
    peak = peak_bytes(trial)
    return ComparisonRow(
        name=name,
        number=trial.number,
        state=trial.state,
        fits=trial.feasible and peak is not None and peak <= budget_bytes,
        measured=trial.measured is not None,
        peak=peak,
        headroom=None if peak is None else budget_bytes - peak,
        seconds=step_seconds(trial),
        noise=trial.measured.noise if trial.measured else None,
        overhead=overhead(trial, reference),
        predicted_peak=trial.predicted.peak_bytes if trial.predicted else None,
        predicted_seconds=trial.predicted.step_seconds if trial.predicted else None,
    )


def overhead(trial: Trial, reference: Trial | None) -> float | None:
    """Step time over the reference's as a share: both measured, else both predicted, else None."""
    if reference is None:
        return None
    pairs = [(trial.measured, reference.measured), (trial.predicted, reference.predicted)]
    for ours, base in pairs:
        if ours is not None and base is not None and ours.step_seconds and base.step_seconds:
            return ours.step_seconds / base.step_seconds - 1
    return None
