"""Candidates judged by compiled steps: each is compiled first, which may fail, and takes most of the time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from autockpt.errors import ConflictError, MeasurementError
from autockpt.schema import CompileMode, Prediction, Trial
from autockpt.schema.known import NONE
from autockpt.tuning.finals import first_rounds
from autockpt.tuning.targets.base import Foresee
from autockpt.tuning.targets.real_steps import FINALISTS, FINALS_SHARE, RealSteps
from autockpt.tuning.trials import Candidate, Score, Trials

LATELY = 3
"""So many plans before it say how long the next one takes to compile and measure."""
ANSWERING = 5.0
"""Seconds that a worker gets at least before it is ended at the time limit."""
_COMPILING = {
    "layers": "The first plan with a choice compiles a layer for it, which takes a while; what comes later finds it.",
    "model": "Every plan is compiled as a whole, which takes a while; later runs find it.",
}


@dataclass(kw_only=True)
class CompiledSteps(RealSteps):
    """Real steps by a measurer that compiles as ``mode`` says, within the time limit: ``within`` is the measurer's."""

    mode: CompileMode
    within: Callable[[float], AbstractContextManager[None]]
    refuses_budgets: bool = False
    _took: list[float] = field(default_factory=list)  # seconds per plan, compiling included
    _typical: float | None = None  # seconds of a step so far

    def begin(self, trials: Trials, foresee: Foresee | None = None) -> None:
        """Says what takes long."""
        self._typical = next((t.measured.step_seconds for t in reversed(trials.all) if t.measured is not None), None)
        self.clock.listener.note(_COMPILING[self.mode])

    @property
    def device_kind(self) -> str:
        return self.measurer.environment.device.kind

    def score(self, candidate: Candidate, budget_bytes: int | None) -> Score | None:
        """Measure a plan; one that the compiler refuses failed. None where time ran out over it."""
        began = self.clock.elapsed
        expected = Prediction(peak_bytes=0, step_seconds=self._typical)
        try:
            with self.within(max(ANSWERING, self.clock.seconds_left)):
                score = super().score(replace(candidate, predicted=expected), budget_bytes)
        except ConflictError as error:
            score = Score("failed", message=error.message)
            if not self.refuses_budgets and any(c.kind == "compile_budget" for c in candidate.choices.values()):
                self.refuses_budgets = True
                self.notes.append(f"no compile_budget for this model: {error.message}")
        except MeasurementError as error:
            score = Score("failed", message=error.message)
            if self.clock.seconds_left <= 0:  # the worker was ended while it compiled; the next run tries again
                self.notes.append(f"{candidate.name} was not compiled and measured by the time limit")
                return None
        self._took.append(self.clock.elapsed - began)
        if score is not None and score.measured is not None:
            self._typical = score.measured.step_seconds
        return score

    def reserved(self, trials: Trials, known: Sequence[Trial]) -> float:
        """What the next plan takes, and then the finals; nothing before the two plans that say what a budget is."""
        if self.clock.timeout is None or not self._took or len(trials.all) < 2:
            return 0.0
        contest = [*trials.ranking()[:FINALISTS], *_compared(known)]
        anew = sum(t.measured.compile_seconds for t in contest if t.measured and t.number < trials.resumed)
        finals = min(first_rounds(contest) * 2 + anew, FINALS_SHARE * self.clock.timeout)
        return finals + statistics.median(self._took[-LATELY:])

    def winner(self, trials: Trials, known: Sequence[Trial], budget_bytes: int, seconds: float) -> Trial | None:
        """The best plan by steps side by side; where time runs out over them, the best by those it was tried with."""
        try:  # plans of an earlier run are compiled here first
            with self.within(max(ANSWERING, self.clock.seconds_left)):
                return super().winner(trials, _compared(known), budget_bytes, seconds)
        except MeasurementError:
            if self.clock.seconds_left > 0:
                raise
        self.notes.append("the time limit was reached while the best plans were measured side by side")
        return trials.best


def _compared(known: Sequence[Trial]) -> list[Trial]:
    """Saving everything, and the fastest other well-known plan that fits."""
    none = [trial for trial in known if trial.measured is not None and trial.name == NONE]
    others = (trial for trial in known if trial.feasible is not False and trial not in none)  # None: not known yet
    return none + sorted(others, key=lambda trial: trial.score_seconds)[:1]
