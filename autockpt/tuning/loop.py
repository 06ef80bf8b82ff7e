"""The loop of a search: baselines, the budget in bytes, candidates, finals.

It is the same for every target and proposer: a proposer says what to try next, a target evaluates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from autockpt.errors import AutockptError, MeasurementError, TimeLimitReached
from autockpt.schema import Choice, ResolvedBudget, Trial
from autockpt.schema.baselines import NONE
from autockpt.tuning.targets.base import CHECKS, Target
from autockpt.tuning.trials import Candidate, Result, Trials

MAX_CRASHES = 2
"""Crashes of measuring processes after which a plan is given up."""
_GIVEN_UP = Result("failed", message=f"not measured: {MAX_CRASHES} processes ended in the middle of it")


class Proposer(Protocol):
    """Proposes the plans of one search, and resolves its budget to bytes.

    ``baselines`` are plans by name. ``smallest_peak`` is the least reachable peak in bytes that is known so far, 0 at
    first. Both iterators are advanced only after the result of their last candidate was added to the trials.
    """

    baselines: dict[str, dict[str, Choice]]
    smallest_peak: int

    def begin(self) -> None:
        """Prepare. Raises InfeasibleError where the budget is known to be out of reach before any step."""

    def baseline_candidates(self, loop: Loop) -> Iterator[Candidate]:
        """The baselines, which are tried whatever the budget is. Raises where none of them can run."""
        ...

    def resolve(self, stopped: str) -> bool:
        """Resolve the budget by the peaks of the trials so far, and judge these. ``stopped``: why there are no more.

        Returns whether memory that plain training leaves free can make a step faster, as when FSDP2 keeps weights
        gathered.
        """
        ...

    def candidates(self, loop: Loop) -> Iterator[Candidate]:
        """Plans to try until a limit of the ``loop`` is reached or none can be better."""
        ...

    def infeasible(self) -> AutockptError:
        """The error for a budget that no plan fits."""
        ...


@dataclass
class Loop:
    """One search: ``proposer`` yields candidates, ``target`` evaluates them, ``trials`` records the results.

    At most as many candidates are tried as the target's request says, within the time limit of the trials' clock.
    After ``run``, ``best`` is the result (None where it was ``interrupted`` before any plan that fits was measured) and
    ``stopped`` the reason why it ended. ``last_seconds`` is how long the last candidate took, its ghost runs included.
    """

    proposer: Proposer
    target: Target
    trials: Trials
    best: Trial | None = None
    interrupted: bool = False
    stopped: str = ""
    last_seconds: float = 0.0
    _more_is_faster: bool = False

    def __post_init__(self) -> None:
        self.clock, self.max_candidates = self.trials.clock, self.target.request.trials

    def run(self) -> None:
        """Search until the trials, the time or the plans are used up. Ctrl-C ends the search with the best plan so far.

        Raises InfeasibleError with the smallest reachable peak where no plan fits, TimeLimitReached where the time was
        too short to know, KeyboardInterrupt after Ctrl-C where not even the budget in bytes was known.
        """
        try:
            self.proposer.begin()
            self.clock.listener.stage("baselines", len(self.proposer.baselines))
            # whatever they need: the budget may be a share of their peaks
            self._try(self.proposer.baseline_candidates(self))
            for note in self.trials.notes:  # now, as the user may want to stop and correct the step
                self.clock.listener.note(note)
            if shorter := self.clock.limit_by(trial.measured for trial in self.trials.all):
                self.clock.listener.note(shorter)
            self._more_is_faster = self.proposer.resolve(self.stopped)
            if not self.binding:
                self.stopped = "saving everything fits the budget, so there is nothing to trade"
                self.best = self._plain
            else:
                # progress counts candidates; in a simulation, which tries one, ghost runs of that
                steps = max(0, self.max_candidates - self.trials.spent)
                steps = steps if self.target.request.measures else CHECKS + 1
                self.clock.listener.stage("search", steps)
                self._try(self.proposer.candidates(self))
                self.clock.listener.stage("finals")
                # baselines are timed alongside, as the answer compares the plan with them
                self.best = self.target.winner(self.trials, self._baselines, self.clock.seconds_left)
        except (KeyboardInterrupt, TimeLimitReached) as end:
            self.interrupted = isinstance(end, KeyboardInterrupt)
            self.stopped = "interrupted; everything measured so far is kept" if self.interrupted else self._time
            if self.trials.budget_bytes is None and self._plain is not None and self.proposer.smallest_peak:
                with suppress(MeasurementError):
                    self.proposer.resolve(self.stopped)
            self.best = self.trials.best
        if self.best is None and not self.interrupted:
            self._refuse()
        if self.trials.budget is None:
            raise KeyboardInterrupt

    @property
    def budget(self) -> ResolvedBudget:
        """In bytes, once the search has ended."""
        assert self.trials.budget is not None
        return self.trials.budget

    def used_up(self, *, one_late: bool = False) -> bool:
        """Whether a limit is reached, which sets ``stopped``. ``one_late``: one step may exceed the time limit."""
        if self.trials.spent >= self.max_candidates:
            return self.stop_if(f"as many candidates were tried as --trials allows ({self.max_candidates})")
        return (
            self.late
            and self.stop_if(self._time)
            and not (one_late and self.clock.seconds_until_stopped >= self.last_seconds)
        )

    def stop_if(self, why: str) -> bool:
        """Note the reason why the search ends, and return whether there is one."""
        self.stopped = why or self.stopped
        return bool(why)

    @property
    def late(self) -> bool:
        """Whether the time limit leaves no room for another candidate besides the finals."""
        reserved = 0.0 if self.clock.timeout is None else self.target.reserved(self.trials, self._baselines)
        return self.clock.seconds_left <= reserved + self.last_seconds

    @property
    def _time(self) -> str:
        return f"the time limit of {self.clock.timeout or 0.0:g} s was reached"

    @property
    def _baselines(self) -> list[Trial]:
        """The trials of baselines."""
        return [t for choices in self.proposer.baselines.values() if (t := self.trials.find(choices)) is not None]

    @property
    def binding(self) -> bool:
        """Whether plain training exceeds the budget; assumed to until the budget is known in bytes."""
        plain = self._plain
        return self.trials.budget_bytes is None or plain is None or not plain.feasible or self._more_is_faster

    @property
    def _plain(self) -> Trial | None:
        """The trial of saving everything."""
        return self.trials.find(self.proposer.baselines[NONE])

    def _try(self, candidates: Iterator[Candidate]) -> None:
        """Evaluate each candidate that is not among the trials."""
        began = self.clock.elapsed
        for candidate in candidates:
            if self.trials.find(candidate.choices) is not None:
                self.clock.listener.advance()
            else:
                self._evaluate(candidate)
                self.last_seconds = self.clock.elapsed - began
            began = self.clock.elapsed

    def _evaluate(self, candidate: Candidate) -> None:
        """Evaluate a new plan and record the trial. A plan that crashed too many processes is not measured again."""
        budget_bytes = None if candidate.encoding == "baseline" else self.trials.budget_bytes
        if candidate.result is not None or not self.target.request.measures:
            result = candidate.result or self.target.evaluate(candidate, budget_bytes)
            trial = self.trials.write(candidate, result)
        else:
            with self.trials.measuring(candidate.choices) as ended:
                result = _GIVEN_UP if ended >= MAX_CRASHES else self.target.evaluate(candidate, budget_bytes)
                trial = self.trials.write(candidate, result)
        if self.target.request.measures or not self.trials.nominal:
            self.clock.listener.trial(trial, self.trials.best)
        else:  # its seconds only rank plans
            self.clock.listener.advance()
        if result.last is not None:
            raise result.last

    def _refuse(self) -> NoReturn:
        """Raises InfeasibleError, or TimeLimitReached where plans that may fit were not measured in time."""
        budget = self.trials.budget
        if self.stopped == self._time and (budget is None or self.proposer.smallest_peak <= budget.bytes):
            raise TimeLimitReached(f"{self._time} before a plan that fits was measured")
        raise self.proposer.infeasible()
