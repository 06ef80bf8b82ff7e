"""The trials of a search: numbered, judged by the budget, written as they end; and which of them is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from autockpt.errors import MeasurementError, TimeLimitReached
from autockpt.schema import SAVE, Choice, Measurement, Prediction, ResolvedBudget, Trial, TrialState, plan_hash
from autockpt.schema.run_directory import RunDirectory, ranking
from autockpt.tuning.clock import Clock


@dataclass(frozen=True)
class Result:
    """The result of a candidate. ``measured`` is None where no step was taken, or it ran out of memory.

    ``last`` is the reason why nothing can be measured afterwards.
    """

    state: TrialState
    measured: Measurement | None = None
    message: str = ""
    last: MeasurementError | None = None


Plans = Mapping[str, Mapping[str, Choice]]  # by name
Parameters = dict[str, float | int | str]
KNOBS, SOLVER = "knobs", "solver"
"""Encodings of plans: by the solver at a point of the sampler, and by the solver alone (simple and leaner plans)."""
HIDDEN_COPIES = "hidden_copies"
"""A knob, and a trial's parameter: the share of the link's time in forward that hidden copies may take."""


@dataclass(frozen=True)
class Candidate:
    """A plan to try, with its name and what proposed it.

    ``predicted`` comes from its ghost run. A ``result`` is set where that rules the plan out, so that no step is taken.
    ``outclassed``: predicted to be worse than another plan, so it is measured briefly.
    """

    choices: dict[str, Choice]
    name: str = ""
    encoding: str = "baseline"
    parameters: Parameters = field(default_factory=dict)
    predicted: Prediction | None = None
    result: Result | None = None
    outclassed: bool = False


_NO_NUMBER = (
    "The loss of the measured steps is not a finite number (nan or inf): bytes and seconds do not depend on that and "
    "hold, but such steps train nothing. Check the batch (labels that are all masked give nan), the weights, and the "
    "range of their type."
)


class Trials:
    """All trials of one question, those of earlier runs first. A plan has one trial, which ``find`` returns.

    ``clock`` is the time of this search.
    """

    def __init__(self, run: RunDirectory | None, clock: Clock) -> None:
        self.run, self.clock = run, clock
        self.all: list[Trial] = run.trials() if run is not None else []
        self.resumed = len(self.all)
        self._by_hash = {t.plan_hash: t for t in self.all}
        self.expected: Callable[[], Mapping[int, float]] = dict  # predicted seconds by trial number
        self.budget: ResolvedBudget | None = None  # a guess until the trials were judged by it
        self.budget_bytes: int | None = None
        self.nominal = False  # predicted seconds only rank plans, and are not shown

    def find(self, choices: Mapping[str, Choice]) -> Trial | None:
        """The trial of this plan, if there is one."""
        return self._by_hash.get(plan_hash(choices))

    @contextmanager
    def measuring(self, choices: Mapping[str, Choice]) -> Iterator[int]:
        """Record that a plan is being measured. Yields how many processes ended while they measured it."""
        if self.run is None:
            yield 0
            return
        plan, ended = plan_hash(choices), self.run.in_flight()
        self.run.write_in_flight({**ended, plan: ended.get(plan, 0) + 1})
        try:
            yield ended.get(plan, 0)
        except (KeyboardInterrupt, TimeLimitReached):
            self.run.write_in_flight(ended)
            raise
        self.run.write_in_flight({other: times for other, times in ended.items() if other != plan})

    def write(self, candidate: Candidate, result: Result) -> Trial:
        """Add the result of a new plan. Returns the trial."""
        return self.put(
            Trial(
                number=len(self.all),
                name=candidate.name,
                encoding=candidate.encoding,
                choices=candidate.choices,
                plan_hash=plan_hash(candidate.choices),
                state=result.state,
                feasible=None if result.state in ("measured", "simulated") else False,
                predicted=candidate.predicted,
                measured=result.measured,
                parameters=dict(candidate.parameters),
                message=result.message,
                elapsed_seconds=self.clock.elapsed,
            )
        )

    def put(self, trial: Trial) -> Trial:
        """Add a trial, or replace the one of its number, judged if the budget is known. Returns what was added."""
        trial = self._judged(trial)
        self.all[trial.number : trial.number + 1] = [trial]
        self._by_hash[trial.plan_hash] = trial
        if self.run is not None:
            self.run.add_trial(trial)
        return trial

    def judge(self, budget: ResolvedBudget) -> None:
        """Compare all trials with the budget. Baselines ran before it was known in bytes."""
        self.budget, self.budget_bytes = budget, budget.bytes
        for trial in list(self.all):
            if self._judged(trial) != trial:
                self.put(trial)

    def _judged(self, trial: Trial) -> Trial:
        if trial.score is None or self.budget_bytes is None:
            return trial
        fits = trial.score.peak_bytes <= self.budget_bytes
        if trial.state == "simulated":
            return trial.model_copy(update={"feasible": fits})
        return trial.model_copy(update={"feasible": fits, "state": "measured" if fits else "over_budget"})

    @property
    def spent(self) -> int:
        """Candidates that took real steps or ran out of memory; in a simulation those that were simulated.

        Neither baselines nor the solver's own simple plans count.
        """
        candidates = (t for t in self.all if t.encoding not in ("baseline", SOLVER))
        return sum(t.score is not None or t.state == "out_of_memory" for t in candidates)

    @property
    def scored(self) -> list[Trial]:
        """Trials with a measurement, or a simulation in a simulated search, whether they fit or not."""
        return [t for t in self.all if t.score is not None]

    @property
    def notes(self) -> tuple[str, ...]:
        """A warning where the loss of a measured step was not finite."""
        numbers = all(t.measured is None or t.measured.loss_is_finite for t in self.all)
        return () if numbers else (_NO_NUMBER,)

    def ranking(self) -> list[Trial]:
        """Scored trials within the budget, fastest first; none before the budget is known."""
        return [] if self.budget_bytes is None else ranking(self.all)

    @property
    def best(self) -> Trial | None:
        """The fastest scored trial within the budget."""
        return next(iter(self.ranking()), None)


def peak_of_trial(trial: Trial) -> int:
    """Bytes: measured where there is a measurement, else predicted."""
    reading = trial.measured or trial.predicted
    assert reading is not None
    return reading.peak_bytes


# -- which of several equally fast plans a search names --------------------------------------------------------------
# The leanest, and among equally lean plans the simplest. Predictions and measurements have errors. Within these errors
# of the fastest step a larger peak buys nothing, and more kinds of choices only make a plan harder to review.

AS_FAST = 0.005
"""Share of the step: plans within it of the fastest count as equally fast."""
AS_LEAN = 0.016
"""Share of the budget: peaks within it of the leanest count as equal. Predicted peaks of real cards err by that."""

NAMED = "of equally fast plans the leanest is named, of equally lean ones the simplest"


def complexity(choices: Mapping[str, Choice]) -> int:
    """Distinct choices besides saving, plus groups of consecutive units with the same choice."""
    others = dict.fromkeys(choice for choice in choices.values() if choice != SAVE)
    return len(others) + sum(1 for _ in groupby(choices.values()))


def preferred(plans: Sequence[Trial], seconds: Mapping[int, float], budget_bytes: int, error: float = AS_FAST) -> Trial:
    """The plan that the search names among ``plans``, which all fit.

    ``seconds`` are their step times by trial number, known within ``error``, a share. No other plan is faster by more
    than that without a larger peak, nor leaner by more than ``AS_LEAN`` of ``budget_bytes`` without a longer step.
    """
    fastest = min(seconds[plan.number] for plan in plans)
    fast = [plan for plan in plans if seconds[plan.number] <= fastest * (1 + error)]
    least = min(map(peak_of_trial, fast))
    lean = [plan for plan in fast if peak_of_trial(plan) <= least + AS_LEAN * budget_bytes]
    return min(lean, key=lambda plan: (complexity(plan.choices), seconds[plan.number], peak_of_trial(plan)))
