"""The search: baselines, the budget in bytes, candidates until enough, finals. One loop, whatever steps run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from autockpt.errors import TimeLimitReached
from autockpt.schema import ResolvedBudget, Trial
from autockpt.schema.known import NONE
from autockpt.tuning.proposers.base import Proposer
from autockpt.tuning.question import Clock
from autockpt.tuning.targets.base import Target
from autockpt.tuning.trials import Candidate, Trials


@dataclass
class SearchResult:
    """What a search found. ``best`` None: interrupted before anything that fits was measured."""

    budget: ResolvedBudget
    best: Trial | None
    trials: list[Trial]
    binding: bool
    smallest_peak: int
    interrupted: bool = False
    resumed: int = 0
    stopped: str = ""
    notes: list[str] = field(default_factory=list)


class Loop:
    """One search. ``proposer`` says what to try, ``target`` what it takes; trials are written down as they end.

    ``most`` candidates may be tried.
    """

    def __init__(self, proposer: Proposer, target: Target, trials: Trials, most: int, clock: Clock) -> None:
        self.proposer, self.target, self.trials, self.most, self.clock = proposer, target, trials, most, clock
        self.stopped, self._took = "", 0.0  # seconds of the last candidate, with the ghost runs that it took

    def run(self) -> SearchResult:
        """Search until the trials, the time or the possibilities are used up; Ctrl-C ends it with the best so far.

        Raises InfeasibleError where nothing fits the budget, naming the smallest reachable peak; TimeLimitReached where
        the time limit came before that was known; KeyboardInterrupt where not even the budget was known in bytes by
        then.
        """
        best, interrupted = None, False
        try:
            self.proposer.begin()
            with self.clock.stage("baselines", self.proposer.most_baselines):
                self._baselines()
            if shorter := self.clock.limit_by(trial.measured for trial in self.trials.all):
                self.clock.listener.note(shorter)
            self._judge()
            if not self.binding:
                self.stopped = "saving everything fits the budget, so there is nothing to trade"
                best = self._plain
            else:
                with self.clock.stage("search", self.proposer.most_steps(self.most - self.trials.spent)):
                    self._search()
                with self.clock.stage("finals"):
                    best = self._finals()
        except (KeyboardInterrupt, TimeLimitReached) as end:
            interrupted = isinstance(end, KeyboardInterrupt)
            self.stopped = "interrupted; everything measured so far is kept" if interrupted else self._limit
            if self.trials.budget_bytes is None and self._plain is not None and self.proposer.knows_the_budget:
                self._judge()
            best = self.trials.best
        if best is None and not interrupted:
            self._refuse()
        if self.proposer.budget is None:
            raise KeyboardInterrupt
        return SearchResult(
            budget=self.proposer.budget,
            best=best,
            trials=self.trials.all,
            binding=self.binding,
            smallest_peak=self.proposer.smallest_peak,
            interrupted=interrupted,
            resumed=self.trials.resumed,
            stopped=self.stopped,
            notes=[*self.proposer.notes, *self.target.notes, *self.trials.notes],
        )

    @property
    def binding(self) -> bool:
        """Whether the budget asks for anything at all; taken for granted until the budget is known in bytes."""
        plain = self._plain
        return self.trials.budget_bytes is None or plain is None or not plain.feasible

    @property
    def _plain(self) -> Trial | None:
        """The trial of saving everything."""
        return self.trials.find(self.proposer.known[NONE])

    def _baselines(self) -> None:
        """Plans that everybody knows, whatever they need: the budget may be a share of what they do."""
        for candidate in self.proposer.baselines(self._used_up):
            if self.trials.find(candidate.choices) is None:
                began = self.clock.elapsed
                self._try(candidate)
                self._took = self.clock.elapsed - began
            else:
                self.clock.listener.advance()
        for note in self.trials.notes:  # time to stop and mend it, and not everybody sees the answer's notes
            self.clock.listener.note(note)

    def _judge(self) -> None:
        """From now on the budget is known in bytes, and every trial is held against it."""
        self.trials.judge(self.proposer.resolve(self.stopped))
        self.proposer.learn_budget()

    def _search(self) -> None:
        """Plans from elsewhere first, then what the proposer thinks best, until it is enough."""
        for candidate in self.proposer.first(self._used_up):
            if self.trials.find(candidate.choices) is None and not self._used_up():
                self._try(candidate)
        repeats, owed = 0, self.proposer.tries_one_late and not self.trials.spent
        while not self._enough(repeats, owed and self.clock.seconds_until_stopped >= self._took):
            began = self.clock.elapsed
            candidate = self.proposer.propose()
            trial, repeats, owed = self.trials.find(candidate.choices), repeats + 1, False
            fresh = trial is None and candidate.allowed
            if fresh:
                trial, repeats = self._try(candidate), 0
            self.proposer.tell(candidate, trial, fresh)
            self._took = self.clock.elapsed - began if fresh else self._took
        if not self._late:
            for candidate in self.proposer.last():
                if self.trials.find(candidate.choices) is None and not self._late:
                    self._try(candidate)

    def _try(self, candidate: Candidate) -> Trial | None:
        """Score a plan where its ghost run says that this can be worth it; None where time ran out over it."""
        predicted, score = self.proposer.foresee(candidate)
        if score is None:
            budget_bytes = None if candidate.encoding == "baseline" else self.trials.budget_bytes
            score = self.target.score(candidate, predicted, budget_bytes)
        if score is None:
            return None
        trial = self.trials.write(candidate, score, elapsed=self.clock.elapsed, predicted=predicted)
        self.clock.listener.trial(trial, self.trials.best)
        return trial

    def _finals(self) -> Trial | None:
        """The plan to name; well-known plans are timed with the best: the table sets their step times against it.

        Where nothing was tried within a time limit an earlier verdict stands: more time went into that.
        """
        assert self.trials.budget_bytes is not None
        named, new = self.trials.named, len(self.trials.all) - self.trials.resumed
        if named is not None and named.feasible and not new and self.clock.timeout is not None:
            self.target.notes.append(
                "no other plan was tried: what the earlier search named stands, with its step times"
            )
            return named
        compared, left = self.proposer.compared(), self.clock.seconds_left
        return self.target.winner(self.trials, compared, self.trials.budget_bytes, left)

    def _refuse(self) -> NoReturn:
        """Raises InfeasibleError, or TimeLimitReached where plans may fit that were not measured for want of time."""
        budget = self.proposer.budget
        if self.stopped == self._limit and (budget is None or self.proposer.smallest_peak <= budget.bytes):
            raise TimeLimitReached(f"{self._limit} before a plan that fits was measured")
        raise self.proposer.infeasible()

    # -- when to stop -------------------------------------------------------------------------------------------------

    def _used_up(self) -> bool:
        """Whether a limit is reached; ``stopped`` then says which."""
        if self.trials.spent >= self.most:
            return self._over(f"as many candidates were tried as --trials allows ({self.most})")
        return self._late and self._over(self._limit)

    @property
    def _limit(self) -> str:
        return f"the time limit of {self.clock.timeout or 0.0:g} s was reached"

    @property
    def _late(self) -> bool:
        """Whether the time limit leaves no room for another candidate besides the finals."""
        reserved = 0.0
        if self.clock.timeout is not None and self.proposer.knows_the_budget:
            reserved = self.target.reserved(self.trials, self.proposer.compared())
        return self.clock.seconds_left <= reserved + self._took

    def _enough(self, repeats: int, owed: bool) -> bool:
        """Whether the search should end; ``stopped`` then says why. ``owed``: not for want of time."""
        if self._used_up() and not owed:
            return True
        if repeats >= self.target.most_repeats:
            return self._over("the space offers no further plan within the budget")
        return self._over(self.proposer.nothing_left())

    def _over(self, why: str) -> bool:
        self.stopped = why or self.stopped
        return bool(why)
