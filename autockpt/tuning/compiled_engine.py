"""The search by compiled steps: well-known plans, uniform budgets, the eager solver's plan, then what these say.

Every plan is measured. Nothing is predicted: ghost runs see eager ops, neither what a compiler fuses nor what its
partitioner saves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autockpt.errors import AutockptError, ConflictError, InfeasibleError, MeasurementError
from autockpt.history.rundir import RunDirectory
from autockpt.measuring import WorkerMeasurer
from autockpt.schema import (
    SAVE,
    Choice,
    CompileMode,
    Prediction,
    ResolvedBudget,
    Trial,
    format_bytes,
)
from autockpt.schema.known import ALL, EVERY_2, NONE, known_plans
from autockpt.tuning.book import Book, Score
from autockpt.tuning.engine import Found
from autockpt.tuning.finals import BATCH
from autockpt.tuning.job import Clock, Limits
from autockpt.tuning.scoring import FINALISTS, MOST_REPEATS, RealSteps
from autockpt.tuning.splits import Cost, Split, fraction, from_knobs, proposals, space, to_knobs
from autockpt.tuning.study import Study

Plans = Mapping[str, Mapping[str, Choice]]  # by what they are called
Resolve = Callable[[int, int], ResolvedBudget]  # peaks of saving everything and of the leanest plan -> the budget
EagerPlans = Callable[[float], Plans]  # the budget's place between these two, from 0 to 1 -> plans that fit it eagerly

FRACTIONS = (0.8, 0.6, 0.4, 0.2)
"""Budgets that are measured for all layers alike before anything else."""
FINALS_SHARE = 0.2
"""Of the time limit, at most, is kept for the finals."""
SWITCHING = 1.25
"""What a cycle of the finals takes beside its step: plans are attached, taken off and tidied up after in turns."""
LATELY = 3
"""So many plans before it say how long the next one takes to compile and measure."""
ANSWERING = 5.0
"""Seconds that a worker gets at least before it is ended at the time limit."""
_LONGER = (
    "Allow more --timeout or --trials; what was compiled and measured is kept, and the same command goes on from it."
)
_COMPILING = {
    "layers": "The first plan with a choice compiles a layer for it, which takes a while; what comes later finds it.",
    "model": "Every plan is compiled as a whole, which takes a while; later runs find it.",
}


@dataclass
class CompiledEngine:
    """One search by compiled steps. ``measurer`` compiles as ``mode`` says; ``kinds`` are those that may be tried.

    Trials are written to the run directory as they end. ``seeds`` are plans from elsewhere, ``eager`` those of the
    eager solver; both are only tried.
    """

    mode: CompileMode
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    scorer: RealSteps
    measurer: WorkerMeasurer
    limits: Limits
    room: int
    run: RunDirectory | None
    storage: str
    clock: Clock
    resolve: Resolve
    seeds: Plans
    eager: EagerPlans

    def __post_init__(self) -> None:
        self.book = Book(self.run)
        self.listener = self.clock.listener
        self.budgets = "recompute" in self.kinds
        self.known: dict[str, dict[str, Choice]] = known_plans(self.layers, self.kinds)
        if self.mode == "model":  # where every plan is compiled anew, one that is seldom good is not worth it
            self.known.pop(EVERY_2, None)
        self.notes: list[str] = []
        self.stopped = ""
        self.budget: ResolvedBudget | None = None
        self.took: list[float] = []  # seconds per plan, compiling included

    def search(self) -> Found:
        """Measure until the trials, the time or the ideas are used up. Raises InfeasibleError where nothing fits."""
        best, interrupted = None, False
        try:
            study = Study(space(self.mode), {}, name="compiled", storage=self.storage, seed=self.limits.seed)
            self.listener.note(_COMPILING[self.mode])
            with self.clock.stage("baselines", len(self.known) + len(FRACTIONS)):
                self._baselines()
            self.budget = self._resolved()
            if self.binding:
                with self.clock.stage("search", max(0, self.limits.trials - self.book.spent)):
                    plans = {} if self._enough(0) else {**self.seeds, **self.eager(self._share)}
                    for name, choices in plans.items():
                        if not self._enough(0) and self.book.find(dict(choices)) is None:
                            self._try(dict(choices), name, "seed")
                    self._search(study)
                with self.clock.stage("finals"):
                    best = self._finals()
            else:
                self.stopped = "saving everything fits the budget, so there is nothing to trade"
                best = self.book.find(self.known[NONE])
        except KeyboardInterrupt:
            interrupted, self.stopped = True, "interrupted; everything measured so far is kept"
            if self.budget is None and self.book.find(self.known[NONE]) is not None and not self._unknown:
                self.budget = self._resolved()
            best = self.book.best
        if self.budget is None:
            raise KeyboardInterrupt
        if best is None and not interrupted:
            raise self._infeasible()
        return Found(
            budget=self.budget,
            best=best,
            trials=self.book.trials,
            binding=self.binding,
            smallest_peak=self._smallest,
            interrupted=interrupted,
            resumed=self.book.resumed,
            stopped=self.stopped,
            notes=self.notes,
        )

    @property
    def binding(self) -> bool:
        """Whether the budget asks for anything at all."""
        none = self.book.find(self.known[NONE])
        return none is None or not none.feasible

    @property
    def _smallest(self) -> int:
        return min((t.measured.peak_bytes for t in self.book.trials if t.measured is not None), default=0)

    @property
    def _leanest(self) -> int:
        """Peak of recomputing everything, with which every run begins, so that all mean the same budget.

        The least peak there is where that does not run.
        """
        trial = self.book.find(self.known.get(ALL, {}))
        return trial.measured.peak_bytes if trial is not None and trial.measured is not None else self._smallest

    @property
    def _unknown(self) -> bool:
        """Whether the budget is a share of a range whose lean end was not tried yet."""
        if ALL not in self.known or self.book.find(self.known[ALL]) is not None:
            return False
        return self.resolve(self._smallest, 0).bytes != self.resolve(self._smallest, self._smallest).bytes

    @property
    def _share(self) -> float:
        """Where the budget lies between the leanest plan and saving everything, both compiled."""
        none = self.book.find(self.known[NONE])
        assert self.budget is not None
        if none is None or none.measured is None or none.measured.peak_bytes <= self._leanest:
            return 1.0
        return (self.budget.bytes - self._leanest) / (none.measured.peak_bytes - self._leanest)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _baselines(self) -> None:
        uniform = {f"budget {f:g}": Split(f, f, 0).choices(self.layers) for f in FRACTIONS} if self.budgets else {}
        for name, choices in {**self.known, **uniform}.items():
            if name in uniform and not self.budgets:
                break
            if self.book.find(choices) is not None:
                self.listener.advance()
            elif not self._enough(0):
                self._try(choices, name, "baseline")
            if self.book.scored or self._enough(0):
                if name not in uniform or self.budgets:
                    self.known[name] = choices
            elif not self._memory_ran_out:
                raise self._failure()  # the rest would fail alike

    def _resolved(self) -> ResolvedBudget:
        none = self.book.find(self.known[NONE])
        if self._smallest == 0:
            raise self._failure()
        if self._unknown:
            raise MeasurementError(
                "the budget is a share of what activations take, which is not known before recomputing everything was "
                f"measured: {self.stopped}",
                remedy=_LONGER,
            )
        top = none.measured.peak_bytes if none is not None and none.measured is not None else self.room
        budget = self.resolve(top, self._leanest)
        self.book.judge(budget.bytes)
        return budget

    @property
    def _memory_ran_out(self) -> bool:
        return any(trial.state == "out_of_memory" for trial in self.book.trials)

    def _failure(self) -> AutockptError:
        """Why not one step could be measured."""
        said = [t for t in self.book.trials if t.message]
        if self._memory_ran_out:
            return InfeasibleError(
                f"no compiled step runs on this device: {said[-1].message}",
                remedy="Use a smaller batch (with --accumulate to keep its effect), a shorter sequence, or LoRA.",
            )
        if not said:
            return MeasurementError(f"no compiled step could be measured: {self.stopped}", remedy=_LONGER)
        why = said[0].message
        return MeasurementError(f"no compiled step could be measured: {why}", remedy="Search without --compile.")

    def _infeasible(self) -> InfeasibleError:
        assert self.budget is not None
        smallest = self._smallest
        return InfeasibleError(
            f"no compiled step fits {format_bytes(self.budget.bytes)}: the leanest of {self.book.spent} measured plans "
            f"needs {format_bytes(smallest)}",
            remedy="Raise the budget, use a smaller --batch-size (with --accumulate to keep its effect), or search "
            "without --compile, where layers may be offloaded.",
            smallest_peak=smallest,
        )

    def _try(self, choices: dict[str, Choice], name: str, encoding: str, split: Split | None = None) -> Trial | None:
        """Measure a plan; one that the compiler refuses is a trial that failed. None where time ran out over it."""
        limit, began = self.budget.bytes if self.budget is not None else None, self.clock.elapsed
        try:
            with self.measurer.within(max(ANSWERING, self._seconds_left)):
                score = self.scorer.score(choices, Prediction(peak_bytes=0, step_seconds=self._typical), limit)
        except ConflictError as error:
            score = Score("failed", message=error.message)
            if self.budgets and "190758" in error.message:
                self.budgets = False
                self.notes.append(
                    "no compile_budget for this model: it draws random numbers (dropout), and PyTorch would draw "
                    "others in backward (pytorch#190758)"
                )
        except MeasurementError as error:
            score = Score("failed", message=error.message)
            if self._seconds_left <= 0:  # the worker was ended while it compiled; the next run tries again
                self.notes.append(f"{name} was not compiled and measured by the time limit")
                return None
        self.took.append(self.clock.elapsed - began)
        parameters = None if split is None else split.parameters
        trial = self.book.write(choices, name, encoding, score, elapsed=self.clock.elapsed, parameters=parameters)
        self.listener.trial(trial, self.book.best)
        return trial

    @property
    def _typical(self) -> float | None:
        """Seconds of a step so far."""
        return next((t.measured.step_seconds for t in reversed(self.book.trials) if t.measured is not None), None)

    # -- proposing ----------------------------------------------------------------------------------------------------

    def _search(self, study: Study) -> None:
        """In turns what should be best by all that was measured, and what the sampler wants to know."""
        assert self.budget is not None
        repeats, own_turn = 0, True
        while not self._enough(repeats):
            ideas = proposals(self._costs(), self.budget.bytes, self.mode, len(self.layers)) if own_turn else []
            if ideas:
                study.enqueue([to_knobs(ideas[0], self.mode, len(self.layers))])
            own_turn = not own_turn
            number, parameters = study.ask()
            split = from_knobs(parameters, self.mode, len(self.layers), shares=self.budgets)
            choices = split.choices(self.layers)
            trial = self.book.find(choices)
            if trial is not None or not self._allowed(choices):
                repeats += 1
            else:
                repeats = 0
                trial = self._try(choices, str(split), "proposed" if ideas else "knobs", split)
            if trial is None or trial.measured is None:
                study.fail(number)
            else:
                violation = trial.measured.peak_bytes / self.budget.bytes - 1
                study.tell(number, trial.measured.step_seconds, violation, trial)

    def _allowed(self, choices: Mapping[str, Choice]) -> bool:
        return all(c.kind in self.kinds or (self.budgets and c.kind == "compile_budget") for c in choices.values())

    def _costs(self) -> dict[Split, Cost]:
        """All splits that were measured."""
        costs: dict[Split, Cost] = {}
        for trial in self.book.scored:
            split = self._as_split(trial.choices)
            if split is not None and trial.measured is not None:
                costs[split] = Cost(trial.measured.peak_bytes, trial.measured.step_seconds)
        return costs

    def _as_split(self, choices: Mapping[str, Choice]) -> Split | None:
        """The split that a plan is, if it is one."""
        values = [fraction(choices.get(name, SAVE)) for name in self.layers]
        count = next((i for i, v in enumerate(values) if v != values[0]), 0)
        if None in values or any(v != values[-1] for v in values[count:]):
            return None
        return Split.of(values[0] or 0.0, values[-1] or 0.0, count, len(self.layers))

    def _enough(self, repeats: int) -> bool:
        """Whether the search should end; ``stopped`` then says why."""
        if used_up := self.limits.used_up(self.book.spent, self.clock, self._reserved):
            self.stopped = used_up
        elif repeats >= MOST_REPEATS:
            self.stopped = "the space offers no further plan"
        return bool(self.stopped)

    @property
    def _seconds_left(self) -> float:
        return self.limits.seconds_left(self.clock)

    @property
    def _reserved(self) -> float:
        """Seconds of the time limit in which no plan is begun: what the next one takes, and then the finals.

        None before the budget is known, without which nothing is an answer.
        """
        if self.limits.timeout is None or not self.took or self._unknown:
            return 0.0
        contest = [*self.book.ranking()[:FINALISTS], *self._beside()]
        anew = sum(t.measured.compile_seconds for t in contest if t.measured and t.number < self.book.resumed)
        finals = min(_first_rounds(contest) * 2 + anew, FINALS_SHARE * self.limits.timeout)
        return finals + statistics.median(self.took[-LATELY:])

    def _beside(self) -> list[Trial]:
        """Plans to be timed with the finalists: saving everything, and the fastest of the well-known ones that fits."""
        tried = [trial for choices in self.known.values() if (trial := self.book.find(choices)) is not None]
        none = [trial for trial in tried if trial.measured is not None and trial.name == NONE]
        return none + sorted((t for t in tried if t.feasible and t not in none), key=lambda t: t.score_seconds)[:1]

    def _finals(self) -> Trial | None:
        """The best plan by steps side by side; where time runs out over them, the best by those it was tried with."""
        assert self.budget is not None
        beside = self._beside()
        finalists = self.book.ranking()[:FINALISTS]
        while beside and _first_rounds([*finalists, *beside]) > self._seconds_left:
            beside.pop(0)
        left = self._seconds_left - _first_rounds([*finalists, *beside])
        if left > 0:
            try:  # plans of an earlier run are compiled here first
                with self.measurer.within(max(ANSWERING, self._seconds_left)):
                    best = self.scorer.winner(self.book, beside, self.budget.bytes, left)
                self.notes.extend(self.scorer.notes)
                return best
            except MeasurementError:
                if self._seconds_left > 0:
                    raise
        self.notes.append("the time limit left no room to measure the best plans side by side")
        return self.book.best


def _first_rounds(trials: Sequence[Trial]) -> float:
    """Seconds that the first rounds of the finals take, all or nothing: a cycle to warm up and a timed one each."""
    return SWITCHING * 2 * BATCH * sum(t.score_seconds for t in trials if t.measured is not None)
