"""The loop of a search: baselines, the budget in bytes, candidates, finals. It is the same for every target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from autockpt.errors import AutockptError, MeasurementError, TimeLimitReached
from autockpt.schema import Choice, ResolvedBudget, Trial
from autockpt.schema.baselines import NONE
from autockpt.tuning.clock import Clock
from autockpt.tuning.targets.base import Target
from autockpt.tuning.trials import Candidate, Score, Trials

MAX_CRASHES = 2
"""After so many processes crashed while they measured a plan, the search goes on without it."""
_GIVEN_UP = Score("failed", message=f"not measured: {MAX_CRASHES} processes ended in the middle of it")


class Proposer(Protocol):
    """Proposes plans of one question, and knows what its budget means.

    ``baselines`` are by name. ``smallest_peak`` is the least reachable peak in bytes, as far as is
    known; 0 where nothing is. When the next candidate is asked for, the result of the one before is among the trials.
    """

    baselines: dict[str, dict[str, Choice]]
    smallest_peak: int

    def begin(self) -> None:
        """Open what proposing needs, if anything. Raises InfeasibleError for a budget known to be out of reach."""

    def baseline_candidates(self, loop: Loop) -> Iterator[Candidate]:
        """Plans to begin with. Asked for the next one when the one before it was tried; raises where none can run."""
        ...

    def resolve(self, stopped: str) -> bool:
        """Judge all trials by the budget in bytes, as they tell it. ``stopped``: why there are no more of them.

        Returns whether memory that saving everything leaves can make the step faster: FSDP2 may keep weights gathered.
        """
        ...

    def candidates(self, loop: Loop) -> Iterator[Candidate]:
        """Plans to try, one after the other, until a limit of the ``loop`` is reached or none can be better."""
        ...

    def infeasible(self) -> AutockptError:
        """The error for a budget that nothing fits."""
        ...


@dataclass
class Loop:
    """One search: ``proposer`` yields candidates, ``target`` scores candidates, ``trials`` records each as it ends.

    At most ``max_candidates`` are tried, within the ``clock``'s time limit. Once it has run, ``best`` is what it found
    (None: ``interrupted`` before anything that fits was measured), ``stopped`` why it ended. ``last_seconds`` is how
    long the last candidate took, its ghost runs included.
    """

    proposer: Proposer
    target: Target
    trials: Trials
    max_candidates: int
    clock: Clock
    best: Trial | None = None
    interrupted: bool = False
    stopped: str = ""
    last_seconds: float = 0.0
    _more_is_faster: bool = False

    def run(self) -> None:
        """Search until the trials, the time or the possibilities are used up; Ctrl-C ends it with the best so far.

        Raises InfeasibleError where nothing fits the budget, naming the smallest reachable peak; TimeLimitReached where
        the time limit came before that was known; KeyboardInterrupt where not even the budget was known in bytes by
        then.
        """
        try:
            self.proposer.begin()
            self.clock.listener.stage("baselines", len(self.proposer.baselines))
            # plans that everybody knows, whatever they need: the budget may be a share of what they do
            self._try(self.proposer.baseline_candidates(self))
            for note in self.trials.notes:  # time to stop and mend it, and not everybody sees the answer's notes
                self.clock.listener.note(note)
            if shorter := self.clock.limit_by(trial.measured for trial in self.trials.all):
                self.clock.listener.note(shorter)
            self._more_is_faster = self.proposer.resolve(self.stopped)
            if not self.binding:
                self.stopped = "saving everything fits the budget, so there is nothing to trade"
                self.best = self._plain
            else:
                # candidates; of a simulation, which tries one, the ghost runs of that
                steps = max(0, self.max_candidates - self.trials.spent)
                steps = steps if self.target.scoring.measures else self.target.scoring.checks + 1
                self.clock.listener.stage("search", steps)
                self._try(self.proposer.candidates(self))
                self.clock.listener.stage("finals")
                # baselines are timed with the best: the table sets their step times against it
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
        """Whether a limit is reached; ``stopped`` then says which. ``one_late``: steps may exceed it a little."""
        if self.trials.spent >= self.max_candidates:
            return self.over(f"as many candidates were tried as --trials allows ({self.max_candidates})")
        return (
            self.late
            and self.over(self._time)
            and not (one_late and self.clock.seconds_until_stopped >= self.last_seconds)
        )

    def over(self, why: str) -> bool:
        """Whether there is a reason to stop: ``why``, where it is not empty."""
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
        """Whether the budget asks for anything at all; taken for granted until the budget is known in bytes."""
        plain = self._plain
        return self.trials.budget_bytes is None or plain is None or not plain.feasible or self._more_is_faster

    @property
    def _plain(self) -> Trial | None:
        """The trial of saving everything."""
        return self.trials.find(self.proposer.baselines[NONE])

    def _try(self, candidates: Iterator[Candidate]) -> None:
        """Score new plans one after the other; a plan that its ghost run rules out is judged by that."""
        began = self.clock.elapsed
        for candidate in candidates:
            if self.trials.find(candidate.choices) is not None:
                self.clock.listener.advance()
            else:
                self._score(candidate)
                self.last_seconds = self.clock.elapsed - began
            began = self.clock.elapsed

    def _score(self, candidate: Candidate) -> None:
        """Score a new plan and record the trial; a plan in which processes crashed too often is given up."""
        budget_bytes = None if candidate.encoding == "baseline" else self.trials.budget_bytes
        if candidate.score is not None or not self.target.scoring.measures:
            score = candidate.score or self.target.score(candidate, budget_bytes)
            trial = self.trials.write(candidate, score, elapsed=self.clock.elapsed)
        else:
            with self.trials.measuring(candidate.choices) as ended:
                score = _GIVEN_UP if ended >= MAX_CRASHES else self.target.score(candidate, budget_bytes)
                trial = self.trials.write(candidate, score, elapsed=self.clock.elapsed)
        if self.target.scoring.measures or self.target.scoring.knows_seconds:
            self.clock.listener.trial(trial, self.trials.best)
        else:  # it ranks plans, and is shown to nobody
            self.clock.listener.advance()
        if score.last is not None:
            raise score.last

    def _refuse(self) -> NoReturn:
        """Raises InfeasibleError, or TimeLimitReached where plans may fit that were not measured for want of time."""
        budget = self.trials.budget
        if self.stopped == self._time and (budget is None or self.proposer.smallest_peak <= budget.bytes):
            raise TimeLimitReached(f"{self._time} before a plan that fits was measured")
        raise self.proposer.infeasible()
