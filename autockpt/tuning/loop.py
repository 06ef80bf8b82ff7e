"""The search: baselines, the budget in bytes, candidates until enough, finals. One loop, whatever steps run on."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        self.stopped = ""

    def run(self) -> SearchResult:
        """Search until the trials, the time or the possibilities are used up; Ctrl-C ends it with the best so far.

        Raises InfeasibleError where nothing fits the budget, naming the smallest reachable peak; KeyboardInterrupt
        where not even the budget was known in bytes by then.
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
        except KeyboardInterrupt:
            interrupted, self.stopped = True, "interrupted; everything measured so far is kept"
            if self.trials.budget_bytes is None and self._plain is not None and self.proposer.knows_the_budget:
                self._judge()
            best = self.trials.best
        if self.proposer.budget is None:
            raise KeyboardInterrupt
        if best is None and not interrupted:
            raise self.proposer.infeasible()
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
                self._try(candidate)
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
        while not self._enough(repeats, owed):
            candidate = self.proposer.propose()
            trial, repeats, owed = self.trials.find(candidate.choices), repeats + 1, False
            fresh = trial is None and candidate.allowed
            if fresh:
                trial, repeats = self._try(candidate), 0
            self.proposer.tell(candidate, trial, fresh)
        if self.clock.seconds_left > self._reserved:
            for candidate in self.proposer.last():
                if self.trials.find(candidate.choices) is None and self.clock.seconds_left > self._reserved:
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

    # -- when to stop -------------------------------------------------------------------------------------------------

    def _used_up(self) -> bool:
        """Whether a limit is reached; ``stopped`` then says which."""
        if self.trials.spent >= self.most:
            return self._over(f"as many candidates were tried as --trials allows ({self.most})")
        late = self.clock.seconds_left <= self._reserved
        return late and self._over(f"the time limit of {self.clock.timeout:g} s was reached")

    @property
    def _reserved(self) -> float:
        """Seconds of the time limit that are kept for the finals."""
        if self.clock.timeout is None or not self.proposer.knows_the_budget:
            return 0.0
        return self.target.reserved(self.trials, self.proposer.compared())

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
