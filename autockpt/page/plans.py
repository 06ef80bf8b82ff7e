"""The plans of a run as a page shows them: what was tried, and what the solver would do for other budgets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autockpt.history.rundir import RunDirectory
from autockpt.history.trials import measurements, pareto_front
from autockpt.profiling import build_problem
from autockpt.schema import SAVE, Choice, Graph, Problem, Profile, Trial, Unit, peak_of, plan_hash
from autockpt.schema.words import USELESS_NOISE
from autockpt.solvers import exact
from autockpt.tuning.refit import Fit, fit, priced

THRESHOLDS = 24  # plans that are asked of the solver, at most
PATIENCE = 3.0  # seconds that they may take together
WORTH = 0.005  # share of a step by which a predicted plan must be faster to be worth a mention

BASELINES, SEEDS, SOLVER, REFIT, OPTUNA = (
    "well-known plans",
    "plan to start from",
    "solver",
    "solver, prices refitted",
    "Optuna",
)
PHASES = (BASELINES, SEEDS, SOLVER, REFIT, OPTUNA)


@dataclass(frozen=True)
class Point:
    """A plan on the page. Bytes and seconds, None where unknown; ``low`` and ``high`` are the interval's ends.

    ``basis`` says what peak and seconds are: measured, simulated, predicted (nothing was tried), or nothing.
    """

    key: str
    name: str
    phase: str
    basis: str
    state: str
    fits: bool
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


@dataclass(frozen=True)
class Threshold:
    """From so many bytes on: the fastest plan that was tried, and one that is predicted to be faster, by key."""

    bytes: int
    tried: str | None
    predicted: str | None


@dataclass(frozen=True)
class Plans:
    """All plans of a run by key. ``front`` are keys of the Pareto front, leanest first.

    ``missed_bytes`` and ``missed_seconds`` are how far the solver's model was, at most, from ghost runs and from step
    times of the plans that were tried; None where there is no model.
    """

    points: dict[str, Point]
    front: tuple[str, ...]
    thresholds: tuple[Threshold, ...]
    best: str | None
    missed_bytes: int | None = None
    missed_seconds: float | None = None


def plans_of(
    run: RunDirectory, profile: Profile | None, base: Graph | None, best: str = "", host_budget: int | None = None
) -> Plans:
    """Trials of the run, and what the solver's model predicts for other budgets. ``best`` is the answer's hash."""
    readings = run.readings()
    trials = run.trials()
    points = {}
    # after the first candidate prices are fitted to what was measured
    refitted = [t.number for t in trials if t.encoding != "baseline"][1:]
    for trial in trials:
        measured = measurements([reading for reading in readings if reading.number == trial.number])
        points[f"t{trial.number}"] = _tried(trial, trial.number in refitted, len(measured))
    model = _Model.of(trials, profile, base, best, host_budget) if profile is not None and base is not None else None
    scored = {t.plan_hash for t in trials if t.score is not None}
    walked = model.walk() if model is not None else []
    points |= {point.key: point for point in walked if plan_hash(point.choices) not in scored}
    answer = next((f"t{t.number}" for t in trials if t.plan_hash == best), None)
    return Plans(
        points=points,
        front=tuple(f"t{t.number}" for t in pareto_front(trials)),
        thresholds=_thresholds(points, answer),
        best=answer,
        missed_bytes=model.missed if model is not None else None,
        missed_seconds=model.prices.error_seconds if model is not None else None,
    )


def _tried(trial: Trial, refitted: bool, readings: int) -> Point:
    score, measured = trial.score, trial.measured
    known = measured is not None and 0 < measured.noise < USELESS_NOISE
    seconds = score.step_seconds if score is not None else None
    return Point(
        key=f"t{trial.number}",
        name=f"#{trial.number} {trial.name}",
        phase=phase_of(trial, refitted),
        basis="" if score is None else "measured" if measured is not None else "simulated",
        state=trial.state,
        fits=trial.feasible,
        peak=score.peak_bytes if score is not None else None,
        seconds=seconds,
        low=measured.step_seconds * (1 - measured.noise) if measured is not None and known else None,
        high=measured.step_seconds * (1 + measured.noise) if measured is not None and known else None,
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
    prices = [value for name, value in trial.parameters.items() if name.endswith("_price")]
    if not prices or any(price != 1 for price in prices):
        return OPTUNA
    return REFIT if refitted else SOLVER


@dataclass(frozen=True)
class _Model:
    """The planning problem with prices fitted to the trials, and how far it is from ghost runs.

    ``offset`` bytes are added to the problem's own peaks: the device's context, and what ghost runs showed besides.
    """

    profile: Profile
    base: Graph
    head: Unit | None
    trials: Sequence[Trial]
    offset: int
    missed: int
    host_budget: int | None

    @classmethod
    def of(
        cls, trials: Sequence[Trial], profile: Profile, base: Graph, best: str, host_budget: int | None
    ) -> _Model | None:
        blocks = {unit.name for unit in base.blocks()}
        own = next((menu for menu in profile.menus if menu.representative not in blocks), None)
        head = Unit(name=own.representative, cls="", kind=own.kind, role="head") if own is not None else None
        plain = cls(profile, base, head, trials, 0, 0, host_budget)._problem()
        if not any(len(unit.options) > 1 for unit in plain.units):
            return None
        saving = {unit.name: SAVE for unit in plain.units}
        errors = {
            trial.plan_hash: trial.predicted.peak_bytes - peak_of(plain, saving | trial.choices)
            for trial in trials
            if trial.predicted is not None and priced(plain, trial.choices)
        }
        usual = int(statistics.median(errors.values())) if errors else 0
        offset = errors.get(best, usual or profile.op_times.environment.device.overhead_bytes)
        missed = max((abs(error - offset) for error in errors.values()), default=0)
        return cls(profile, base, head, trials, offset, missed, host_budget)

    @cached_property
    def prices(self) -> Fit:
        """What choices cost by the trials that have step times."""
        return fit(self._problem(), [t for t in self.trials if t.score is not None])

    def walk(self) -> list[Point]:
        """The fastest plans by the model from saving everything downwards, each at the bytes that it needs."""
        plain, prices = self._problem(), self.prices
        fitted = self._problem(prices.scale)
        found: list[Point] = []
        began = time.monotonic()
        most = self.profile.save_all_peak_bytes
        least = min([self.profile.leanest_peak_bytes, *(t.predicted.peak_bytes for t in self.trials if t.predicted)])
        grain = max(1, (most - least) // THRESHOLDS)
        budget = max(most, max(peak_of(plain, {u.name: SAVE for u in plain.units}) + self.offset, 0))
        while len(found) < THRESHOLDS and time.monotonic() - began < PATIENCE:
            answer = exact(fitted.model_copy(update={"budget": budget - self.offset}), time_limit=PATIENCE)
            if not answer.feasible:
                break
            peak = peak_of(plain, answer.choices) + self.offset
            head = self.head.name if self.head is not None else None
            choices = {n: c for n, c in answer.choices.items() if n != head or c != SAVE}
            found.append(_predicted(f"p{len(found)}", choices, peak, prices.predict(plain, answer.choices)))
            budget = min(peak - 1, budget - grain)
        return found

    def _problem(self, price: Mapping[str, float] | None = None) -> Problem:
        return build_problem(
            self.base,
            self.profile.menus,
            budget=0,
            price=price,
            host_budget=self.host_budget,
            base_seconds=self.profile.save_all_seconds,
            head=self.head,
        )


def _predicted(key: str, choices: Mapping[str, Choice], peak: int, seconds: float) -> Point:
    """A plan that only the model speaks of."""
    return Point(
        key=key,
        name="predicted",
        phase="",
        basis="predicted",
        state="predicted",
        fits=False,
        peak=peak,
        seconds=seconds,
        predicted_peak=peak,
        predicted_seconds=seconds,
        choices=choices,
    )


def _thresholds(points: Mapping[str, Point], answer: str | None) -> tuple[Threshold, ...]:
    """Where the best known plan changes as the budget grows, leanest first.

    The run's answer, which finals decided on, stands against plans that cannot be distinguished from it.
    """
    steps: list[Threshold] = []
    tried: Point | None = None
    predicted: Point | None = None
    shown = (p for p in points.values() if p.peak is not None and p.seconds is not None)
    for point in sorted(shown, key=lambda p: (p.peak or 0, p.seconds or 0.0)):
        if point.basis == "predicted":
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


def _faster(point: Point, known: Point | None, answer: str | None = None) -> Point:
    if known is not None and known.key == answer and _alike(point, known):
        return known
    return point if known is None or (point.seconds or 0.0) < (known.seconds or 0.0) else known


def _alike(one: Point, other: Point | None) -> bool:
    """Whether the intervals of two plans meet, or there is no other."""
    if other is None:
        return True
    ends = (one.low, one.high, other.low, other.high)
    return None not in ends and ends[0] <= ends[3] and ends[2] <= ends[1]  # type: ignore[operator]
