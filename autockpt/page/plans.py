"""The plans of a run as a page shows them: what was tried, and what ghost runs and the solver say of other budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autockpt.history.rundir import RunDirectory
from autockpt.history.trials import measurements, undominated
from autockpt.schema import SAVE, Choice, Graph, Plan, Prediction, Profile, Trial, plan_hash
from autockpt.schema.outlook import GhostAnswer
from autockpt.schema.words import USELESS_NOISE
from autockpt.tuning.outlook import ForeseenPlan, OtherBudgets

MEASURED, SIMULATED, GHOST, PREDICTED = "measured", "simulated", "ghost run", "predicted"
SAID = {
    MEASURED: "measured",
    SIMULATED: "simulated",
    GHOST: "ghost run, time predicted",
    PREDICTED: "predicted, never run",
}
WORTH = 0.005  # share of a step by which a predicted plan must be faster to be worth a mention

PHASES = ("well-known plans", "plan to start from", "solver", "solver, prices refitted", "Optuna")
BASELINES, SEEDS, SOLVER, REFIT, OPTUNA = PHASES


@dataclass(frozen=True)
class PlanPoint:
    """A plan on the page. Bytes and seconds, None where unknown; ``low`` and ``high`` are the interval's ends.

    ``basis`` says what peak and seconds are: measured; simulated; of a ghost run, with the time predicted; predicted
    both, by the solver's model; or nothing. ``phase`` is empty for plans that are no trials.
    """

    key: str
    name: str
    phase: str
    basis: str
    state: str
    fits: bool | None
    peak: int | None
    seconds: float | None
    predicted_peak: int | None
    predicted_seconds: float | None
    choices: Mapping[str, Choice]
    low: float | None = None
    high: float | None = None
    host: int = 0
    message: str = ""
    elapsed: float = 0.0
    readings: int = 1

    @property
    def shown(self) -> bool:
        """Whether it can stand in a drawing of peak against time."""
        return self.peak is not None and self.seconds is not None

    @property
    def sure(self) -> bool:
        """Whether peak and time are as good as any of this run's."""
        return self.basis in (MEASURED, SIMULATED)


@dataclass(frozen=True)
class Threshold:
    """From so many bytes on, by key: the fastest plan with sure numbers, and one that is predicted to be faster."""

    bytes: int
    tried: str | None
    predicted: str | None


@dataclass(frozen=True)
class Plans:
    """All plans of a run by key. ``front`` are keys of the Pareto front, leanest first.

    ``missed_bytes`` and ``missed_seconds`` are how far the solver's model was, at most, from ghost runs of other plans
    of its own (where there are none, of plans that were tried) and from step times of trials; None without a model.
    """

    points: dict[str, PlanPoint]
    front: tuple[str, ...]
    thresholds: tuple[Threshold, ...]
    best: str | None
    missed_bytes: int | None = None
    missed_seconds: float | None = None


def plans_of(run: RunDirectory, profile: Profile | None, base: Graph | None, plan: Plan | None) -> Plans:
    """Trials of the run, and what is known of other budgets than that of its answer, ``plan``."""
    best, host_budget = (plan.hash, plan.host_budget_bytes) if plan is not None else ("", None)
    readings, trials = run.readings(), run.trials()
    simulated = bool(run.question.get("hardware"))
    points = {}
    # after the first candidate prices are fitted to what was measured
    refitted = [t.number for t in trials if t.encoding != "baseline"][1:]
    for trial in trials:
        measured = measurements([reading for reading in readings if reading.number == trial.number])
        points[f"t{trial.number}"] = _tried(trial, trial.number in refitted, len(measured), simulated)
    outlook = run.outlook()
    record = {plan_hash(r.choices): r for r in (outlook.plans if outlook is not None else ())}
    model = None
    if profile is not None and base is not None:
        model = OtherBudgets.of(trials, profile, base, best, host_budget, record.values())
    tried = {t.plan_hash for t in trials}
    for number, (key, ghost) in enumerate(record.items()):
        if key not in tried:
            points[f"g{number}"] = _ghost(f"g{number}", ghost, model, simulated)
    walked, missed_bytes, missed_seconds = _predictions(model, record, simulated)
    points |= {point.key: point for point in walked if plan_hash(point.choices) not in {*tried, *record}}
    answer = next((f"t{t.number}" for t in trials if t.plan_hash == best), None)
    sure = [p for p in points.values() if p.sure and p.shown]
    return Plans(
        points=points,
        front=tuple(p.key for p in undominated(sure, lambda p: (p.peak or 0, p.seconds or 0.0))),
        thresholds=_thresholds(points, answer),
        best=answer,
        missed_bytes=missed_bytes,
        missed_seconds=missed_seconds,
    )


def _predictions(
    model: OtherBudgets | None, record: Mapping[str, GhostAnswer], simulated: bool
) -> tuple[list[PlanPoint], int | None, float | None]:
    """The solver's plans for other budgets, and by how many bytes and seconds its model was wrong where that is known.

    Its bytes are moved by what ghost runs of its plans for budgets nearby showed.
    """
    if model is None:
        return [], None, None
    walked = sorted(model.walk(), key=lambda f: f.peak)
    known = [(f, record[key].predicted) for f in walked if (key := plan_hash(f.choices)) in record]
    missed_bytes, missed_seconds = model.missed, model.prices.error_seconds
    errors = []
    for f, ghost in known:
        others = [pair for pair in known if pair[0] is not f and model.head_of(pair[0]) == model.head_of(f)]
        if others:
            errors.append(abs(f.peak + _moved(f, others, model) - ghost.peak_bytes))
        if simulated and ghost.step_seconds is not None:  # as good as a trial's
            missed_seconds = max(missed_seconds, abs(f.seconds - ghost.step_seconds))
    moved = [f.peak + _moved(f, known, model) for f in walked]
    points = [_untried(f"p{n}", PREDICTED, f.choices, moved[n], f.seconds) for n, f in enumerate(walked)]
    return points, max(errors, default=missed_bytes), missed_seconds


def _moved(plan: ForeseenPlan, known: Sequence[tuple[ForeseenPlan, Prediction]], model: OtherBudgets) -> int:
    """Bytes by which ghost runs of plans with the same output head, near this one, were off the model."""
    same = [pair for pair in known if model.head_of(pair[0]) == model.head_of(plan)]
    if not same:
        return 0
    at, by = [f.peak for f, _ in same], [ghost.peak_bytes - f.peak for f, ghost in same]
    return int(np.interp(plan.peak, at, by))


def _tried(trial: Trial, refitted: bool, readings: int, simulated: bool) -> PlanPoint:
    """A trial; one that no step was taken of, because its ghost run did not fit, by that ghost run."""
    measured = trial.measured
    score = trial.score or (trial.predicted if trial.state == "predicted_over" else None)
    basis = MEASURED if measured is not None else SIMULATED if simulated or trial.state == "simulated" else GHOST
    low, high = None, None
    if measured is not None and 0 < measured.noise < USELESS_NOISE:
        low, high = (measured.step_seconds * (1 + side * measured.noise) for side in (-1, 1))
    return PlanPoint(
        key=f"t{trial.number}",
        name=f"#{trial.number} {trial.name}",
        phase=phase_of(trial, refitted),
        basis=basis if score is not None else "",
        state=trial.state,
        fits=trial.feasible,
        peak=score.peak_bytes if score is not None else None,
        seconds=score.step_seconds if score is not None else None,
        low=low,
        high=high,
        predicted_peak=trial.predicted.peak_bytes if trial.predicted else None,
        predicted_seconds=trial.predicted.step_seconds if trial.predicted else None,
        host=score.host_bytes if score is not None else 0,
        choices=trial.choices,
        message=trial.message,
        elapsed=trial.elapsed_seconds,
        readings=max(1, readings),
    )


def phase_of(trial: Trial, refitted: bool = False) -> str:
    """Which part of the search proposed a trial: the solver's own plans have all prices as they are."""
    if trial.encoding == "baseline":
        return BASELINES
    if trial.encoding == "seed":
        return SEEDS
    if trial.encoding == "solver":
        return SOLVER
    prices = [value for name, value in trial.parameters.items() if name.endswith("_price")]
    if not prices or any(price != 1 for price in prices):
        return OPTUNA
    return REFIT if refitted else SOLVER


def _ghost(key: str, ghost: GhostAnswer, model: OtherBudgets | None, simulated: bool) -> PlanPoint:
    """A plan that was ghost-run. In a simulated run that is all there is of any; else times are of fitted prices."""
    seconds = ghost.predicted.step_seconds
    if not simulated and model is not None:
        seconds = model.seconds(ghost.choices) or seconds
    basis = SIMULATED if simulated else GHOST
    choices = ({u.name: SAVE for u in model.base.blocks()} if model is not None else {}) | ghost.choices
    point = _untried(key, basis, choices, ghost.predicted.peak_bytes, seconds)
    return replace(point, host=ghost.predicted.host_bytes)


def _untried(key: str, basis: str, choices: Mapping[str, Choice], peak: int, seconds: float | None) -> PlanPoint:
    """A plan that is no trial."""
    return PlanPoint(
        key=key,
        name="the solver's plan",
        phase="",
        basis=basis,
        state=basis,
        fits=False,
        peak=peak,
        seconds=seconds,
        predicted_peak=peak,
        predicted_seconds=seconds,
        choices=choices,
    )


def _thresholds(points: Mapping[str, PlanPoint], answer: str | None) -> tuple[Threshold, ...]:
    """Where the best known plan changes as the budget grows, leanest first.

    The run's answer, which finals decided on, stands against plans that cannot be distinguished from it.
    """
    steps: list[Threshold] = []
    tried: PlanPoint | None = None
    predicted: PlanPoint | None = None
    for point in sorted((p for p in points.values() if p.shown), key=lambda p: (p.peak or 0, p.seconds or 0.0)):
        if not point.sure:
            predicted = _faster(point, predicted)
        else:
            tried = point if point.key == answer and _alike(point, tried) else _faster(point, tried, answer)
        ahead = predicted
        if ahead is not None and tried is not None and (ahead.seconds or 0) >= (tried.seconds or 0) * (1 - WORTH):
            ahead = None
        now = (tried.key if tried else None, ahead.key if ahead else None)
        if not steps or now != (steps[-1].tried, steps[-1].predicted):
            steps.append(Threshold(point.peak or 0, *now))
    return tuple(steps)


def _faster(point: PlanPoint, known: PlanPoint | None, answer: str | None = None) -> PlanPoint:
    if known is not None and known.key == answer and _alike(point, known):
        return known
    if point.basis == PREDICTED and known is not None and known.basis != PREDICTED:  # its bytes are less sure
        return point if (point.seconds or 0.0) < (known.seconds or 0.0) * (1 - WORTH) else known
    return point if known is None or (point.seconds or 0.0) < (known.seconds or 0.0) else known


def _alike(one: PlanPoint, other: PlanPoint | None) -> bool:
    """Whether the intervals of two plans meet, or one that is no trial is not worth a mention beside the other."""
    if other is None:
        return True
    if not (one.phase and other.phase):
        return abs((one.seconds or 0.0) - (other.seconds or 0.0)) < WORTH * (other.seconds or 0.0)
    ends = (one.low, one.high, other.low, other.high)
    return None not in ends and ends[0] <= ends[3] and ends[2] <= ends[1]  # type: ignore[operator]
