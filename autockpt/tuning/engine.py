"""The search itself: baselines, solver seeds, refit, Optuna, finals. Judging candidates is the scorer's business."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from autockpt.errors import InfeasibleError
from autockpt.history.rundir import RunDirectory
from autockpt.profiling import Profiled
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Prediction,
    Problem,
    ResolvedBudget,
    SearchSpace,
    Trial,
    covers,
    format_bytes,
    label,
)
from autockpt.schema.known import NONE, known_plans
from autockpt.solvers import Ruling, exact
from autockpt.tuning.book import Book, Score, peak_of_trial
from autockpt.tuning.candidates import (
    LADDER_CALLS,
    REFEREE_CALLS,
    Candidate,
    from_knobs,
    from_layers,
    hidden_copies,
    neutral,
)
from autockpt.tuning.dryrun import infeasible
from autockpt.tuning.job import Clock, Limits
from autockpt.tuning.refit import Fit, fit, unseen_bytes
from autockpt.tuning.scoring import Scorer
from autockpt.tuning.study import Parameters, Study
from autockpt.tuning.weighing import foreseen

REFITS = (1, 3, 6)  # after so many scored candidates the solver's plans are asked for again, at the fitted prices

CLOSE = 1.1  # of the budget: a plan that would reserve more is most likely too large whatever is given back
MOST_MISSES = 3  # candidates tried for each that is wanted

Seeds = Mapping[str, Mapping[str, Choice]]  # plans to try before others, by what they are called


@dataclass
class Found:
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


class Engine:
    """One search over one profiled workload, on one device. Trials are written to the run directory as they end.

    ``seeds`` are plans from elsewhere that are tried right after the well-known ones.
    """

    def __init__(
        self,
        *,
        profiled: Profiled,
        scorer: Scorer,
        budget: Budget,
        space: SearchSpace,
        limits: Limits,
        run: RunDirectory | None,
        storage: str,
        clock: Clock,
        seeds: Seeds | None = None,
        referee_calls: int = REFEREE_CALLS,
    ) -> None:
        self.profiled, self.scorer, self.space, self.limits = profiled, scorer, space, limits
        self.storage, self.clock = storage, clock
        self.seeds = {name: dict(choices) for name, choices in (seeds or {}).items()}
        self.referee_calls = referee_calls
        self.listener = clock.listener
        self.asked = budget
        self.units = tuple(u.name for u in profiled.blocks)
        self.known = known_plans(self.units, space.choices)
        self.book = Book(run)
        self.scorer.begin(self.book, lambda trials: foreseen(self.unpriced, trials))
        self.rulings: dict[tuple[Choice, ...], Ruling] = {}
        self.device = profiled.predictor.device
        self.room = self.device.capacity_bytes - profiled.used_by_others
        self.unpriced = profiled.problem(0)
        self.smallest_peak = profiled.smallest_peak(self.known.values(), calls=max(2, referee_calls // 2))
        self.plain_smallest = self.smallest_peak  # a share of a range is of plans as everybody knows them
        if profiled.head is not None and budget.kind == "activation_share":
            self.plain_smallest = profiled.smallest_peak(self.known.values(), plain_head=True)
        # Until the baselines have run, the best guess of what the budget is in bytes.
        size = budget.resolve(self._predict(self.known[NONE]).peak_bytes, self.plain_smallest, self.room)
        self.budget = ResolvedBudget(asked=budget.text, bytes=size, covers=covers(self.device.kind))
        self.started = time.monotonic()
        self.stopped = ""
        self.notes: list[str] = []

    def run(self) -> Found:
        """Search until the trials, the time or the possibilities are used up; Ctrl-C ends it with the best so far.

        Raises InfeasibleError where nothing fits the budget, naming the smallest reachable peak.
        """
        self._refuse_the_impossible()
        best, interrupted = None, False
        try:
            study = self._open_study()  # first: one that cannot be opened should not cost a single step
            with self.clock.stage("baselines", len(self.known)):
                self._measure_baselines()
            self._resolve_budget()
            if not self.binding:
                self.stopped = "saving everything fits the budget, so there is nothing to trade"
                best = self.book.find(self.known[NONE])
            else:
                with self.clock.stage("search", max(0, self.limits.trials - self.book.spent)):
                    self._try_seeds()
                    self._search(study)
                with self.clock.stage("finals"):
                    best = self._finals()
        except KeyboardInterrupt:
            interrupted = True
            self.stopped = "interrupted; everything measured so far is kept"
            best = self._best_so_far()
        if best is None and not interrupted:
            raise self._infeasible()
        return Found(
            budget=self.budget,
            best=best,
            trials=self.book.trials,
            binding=self.binding,
            smallest_peak=self.smallest_peak,
            interrupted=interrupted,
            resumed=self.book.resumed,
            stopped=self.stopped,
            notes=self.notes,
        )

    @property
    def binding(self) -> bool:
        """Whether the budget asks for anything at all; taken for granted until the budget is known in bytes."""
        none = self.book.find(self.known[NONE])
        return self.book.budget_bytes is None or none is None or not none.feasible

    # -- prices and plans -------------------------------------------------------------------------------------------

    @property
    def prices(self) -> Fit:
        """What choices cost by all that was measured so far."""
        return fit(self.unpriced, self.book.scored)

    def _problem(self, prices: Mapping[str, float], free: int) -> Problem:
        """The planning problem at these prices, with ``free`` bytes of the budget left unused."""
        return self.profiled.problem(self._ceiling, prices, free)

    @property
    def _ceiling(self) -> int:
        """Most bytes that a ghost run may show: the budget less the context and less what ghost runs seem to miss."""
        return self.budget.bytes - self.device.overhead_bytes - unseen_bytes(self.book.scored)

    def _predict(self, choices: Mapping[str, Choice]) -> Prediction:
        return self.profiled.predictor.predict(choices)

    def _over_host(self, choices: Mapping[str, Choice]) -> int:
        """Bytes by which a plan's ghost run is over the host budget: such plans are never measured."""
        return self.profiled.predictor.over_host(choices)

    def _candidate(self, parameters: Parameters) -> Candidate:
        if self.space.encoding == "layers":
            return self._whole(from_layers(parameters, self._ceiling, self._problem({}, 0), self.profiled.rule))
        return self._solved(parameters)

    def _whole(self, candidate: Candidate) -> Candidate:
        return Candidate(self.profiled.plan(candidate.choices), candidate.fits)

    def _solved(self, parameters: Parameters, calls: int | None = None) -> Candidate:
        found = from_knobs(
            parameters,
            self.budget.bytes,
            self.prices.scale,
            self._problem,
            self.profiled.rule,
            remembered=self.rulings,
            calls=calls or self.referee_calls,
            faster=self.scorer.worthwhile,
        )
        return self._whole(found)

    def _seeds(self) -> list[Parameters]:
        """The solver's plans at several margins, in the terms of the encoding."""
        if self.space.encoding == "knobs":
            plain = [neutral(self.space, margin) for margin in self.space.margins]
            return [plain[0], *self._hidden(plain[0]), *plain[1:]]
        solved = (self._solved({"margin": m}).choices for m in self.space.margins)
        plans = [*self.known.values(), *self.seeds.values(), *solved]
        menus = self._menus()
        labels: list[Parameters] = [{name: label(plan.get(name, SAVE)) for name in menus} for plan in plans]
        return [point for point in labels if all(point[n] in menu for n, menu in menus.items())]

    def _hidden(self, plain: Parameters) -> list[Parameters]:
        """The price of copies that the simulator prefers to the profile's, if any, where it sees a schedule at all."""
        if not self.device.copy_queues or self.scorer.most_candidates is not None:
            return []
        return hidden_copies(plain, self.space, self.prices.scale.get("offload", 1.0), self._foreseen)

    def _foreseen(self, parameters: Parameters) -> float:
        """Simulated step seconds of the solver's plan under these knobs; infinite where none was found that fits."""
        candidate = self._solved(parameters, calls=LADDER_CALLS)
        seconds = self._predict(candidate.choices).step_seconds
        return seconds if candidate.fits and seconds is not None else math.inf

    def _menus(self) -> dict[str, list[str]]:
        return {unit.name: [label(option.choice) for option in unit.options] for unit in self.unpriced.units}

    # -- the budget -------------------------------------------------------------------------------------------------

    def _refuse_the_impossible(self) -> None:
        """A budget in bytes below what any plan needs is refused before a single step is measured."""
        if self.asked.kind == "bytes" and self.budget.bytes < self.smallest_peak:
            raise self._infeasible()

    def _resolve_budget(self) -> None:
        """Turn the budget into bytes by this job's own peaks, measured where they could be."""
        known = {name: c for name, c in self.known.items() if not self._over_host(c)}
        peaks = {name: peak_of_trial(t) for name, c in known.items() if (t := self.book.find(c)) is not None}
        # The leanest plan is perhaps known from its ghost run alone, which may miss what the measured ones showed.
        leanest = min(self.plain_smallest + unseen_bytes(self.book.scored), *peaks.values())
        size = self.asked.resolve(peaks[NONE], leanest, self.room)
        self.budget = self.budget.model_copy(update={"bytes": size})
        none = self.book.find(self.known[NONE])
        if self.asked.kind in ("share", "activation_share") and none is not None and none.score is None:
            self.notes.append("save-everything does not fit the device: the percentage is of its simulated peak")
        if size > self.room:
            free = format_bytes(self.room)
            self.notes.append(f"the device has less free than the budget ({free}); what does not fit there was not run")
        self.book.judge(size)
        self._keep_within_budget()

    def _keep_within_budget(self) -> None:
        """A simulated allocator that is kept to the budget may make do with less than one that is not."""
        self.profiled.keep_within(self.budget.bytes)
        for trial in self.book.scored:
            close = not trial.feasible and peak_of_trial(trial) <= CLOSE * self.budget.bytes
            if trial.state == "simulated" and close:
                self.book.put(trial.model_copy(update={"predicted": self._predict(trial.choices)}))

    def _infeasible(self) -> InfeasibleError:
        return infeasible(self.profiled, self.budget.bytes, self.smallest_peak)

    # -- trials -----------------------------------------------------------------------------------------------------

    def _measure_baselines(self) -> None:
        for name, choices in self.known.items():
            if self.book.find(choices) is None:
                self._try(choices, name, "baseline", {}, enforce=False)
            else:
                self.listener.advance()
        if not self.book.scored and self.profiled.head is None and self.scorer.source == "measured":
            raise self._infeasible()

    def _open_study(self) -> Study:
        seed = self.limits.seed + self.book.resumed
        menus = {unit.name: [option.choice for option in unit.options] for unit in self.unpriced.units}
        return Study(self.space, menus, name="search", storage=self.storage, seed=seed)

    def _try_seeds(self) -> None:
        """Plans from elsewhere, whatever they cost there: here they are ghost-run and scored like any other."""
        for name, choices in self.seeds.items():
            if self.book.find(choices) is None:
                fits = self._predict(choices).peak_bytes <= self.budget.bytes
                self._try(choices, name, "seed", {}, fits=fits)

    def _search(self, study: Study) -> None:
        study.enqueue(self._seeds())
        repeats, fresh = 0, 0
        while not self._enough(repeats):
            number, parameters = study.ask()
            candidate = self._candidate(parameters)
            trial = self.book.find(candidate.choices)
            if trial is not None:
                repeats += 1
            else:
                repeats, fresh = 0, fresh + 1
                name = f"{self.space.encoding} #{number}"
                trial = self._try(candidate.choices, name, self.space.encoding, parameters, fits=candidate.fits)
                if fresh in REFITS:
                    study.enqueue(self._seeds())
            self._tell(study, number, trial)

    def _try(
        self,
        choices: dict[str, Choice],
        name: str,
        encoding: str,
        parameters: Parameters,
        *,
        enforce: bool = True,
        fits: bool = True,
    ) -> Trial:
        """Score a plan where its ghost run says that this can be worth it; write it down."""
        predicted = self._predict(choices)
        score = Score("predicted_over", message=f"simulated {format_bytes(predicted.peak_bytes)}")
        if self._over_host(choices):
            on_host = f"{score.message}, {format_bytes(predicted.host_bytes)} on the host"
            score = Score("predicted_over", message=on_host)
        elif predicted.peak_bytes <= self.room and (fits or not enforce):
            score = self.scorer.score(choices, predicted, self.budget.bytes if enforce else None)
        elapsed = time.monotonic() - self.started
        trial = self.book.write(
            choices, name, encoding, score, elapsed=elapsed, predicted=predicted, parameters=parameters
        )
        self.listener.trial(trial, self.book.best)
        return trial

    def _tell(self, study: Study, number: int, trial: Trial) -> None:
        """Seconds and violation: measured where there is a measurement, predicted where it did not fit."""
        seconds = (trial.measured or trial.predicted or Prediction(peak_bytes=0)).step_seconds
        if seconds is None:
            study.fail(number)
            return
        violation = peak_of_trial(trial) / self.budget.bytes - 1
        study.tell(number, seconds, min(violation, 0.0) if trial.feasible else max(violation, 0.01), trial)

    def _enough(self, repeats: int) -> bool:
        """Whether the search should end; ``stopped`` then says why."""
        # one plan of the solver's is tried in any case, where no well-known one fits
        candidates = any(t.encoding == self.space.encoding for t in self.book.trials)
        spent = self.book.spent if candidates or self.book.best is not None else 0
        if used_up := self.limits.used_up(spent, self.clock):
            self.stopped = used_up
        elif repeats >= self.scorer.most_repeats:
            self.stopped = "the space offers no further plan within the budget"
        elif self.scorer.most_candidates is not None and self._enough_candidates(self.scorer.most_candidates):
            self.stopped = "the solver's plan is refined, and in a simulation nothing else can beat it by much"
        elif self._nothing_left():
            self.stopped = "no plan can be faster than the best by more than the noise, by the refitted bound"
        return bool(self.stopped)

    def _enough_candidates(self, wanted: int) -> bool:
        """Whether so many plans were found besides the known ones; those that did not fit count for less."""
        tried = [t for t in self.book.trials if t.encoding == self.space.encoding]
        return sum(t.feasible for t in tried) >= wanted or len(tried) >= MOST_MISSES * wanted

    def _nothing_left(self) -> bool:
        """Whether the refitted solver's optimum, less the largest error seen of its predictions, is beaten already."""
        best = self.book.best
        candidates = [t for t in self.book.scored if t.encoding != "baseline"]
        if best is None or best.score is None or len(candidates) < len(self.space.margins):
            return False
        prices = self.prices
        optimum = exact(self._problem(prices.scale, 0))
        if not optimum.feasible:
            return False
        bound = prices.predict(self.unpriced, optimum.choices) - prices.error_seconds
        noise = best.measured.noise if best.measured is not None else 0.0
        return best.score_seconds * (1 - noise) <= bound

    # -- the end ----------------------------------------------------------------------------------------------------

    def _best_so_far(self) -> Trial | None:
        """The fastest that fits, after an interrupt; one among the baselines leaves the budget to be resolved first."""
        if self.book.budget_bytes is None and self.book.find(self.known[NONE]) is not None:
            self._resolve_budget()
        return self.book.best

    def _finals(self) -> Trial | None:
        """The plan to name; every well-known plan is timed beside it: the table sets their step times against it."""
        beside = [trial for choices in self.known.values() if (trial := self.book.find(choices)) is not None]
        best = self.scorer.winner(self.book, beside, self.budget.bytes, self.limits.seconds_left(self.clock))
        self.notes.extend(self.scorer.notes)
        return best
