"""How candidates are judged: by real steps on a device, or by the simulation of one that is not at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring import Measurer, WorkerMeasurer
from autockpt.schema import Choice, CompileMode, Measurement, PlanStatus, Prediction, Trial, WorkloadSpec
from autockpt.solvers.refine import FASTER
from autockpt.tuning.book import Book, Score
from autockpt.tuning.finals import play, remeasured
from autockpt.tuning.job import Clock

SECONDS_PER_TRIAL = 2.0  # of timed cycles, at least three and at most ten of them
FINALISTS = 3
FINAL_SECONDS = 30.0
CONFIRMING_STEPS = 20
MOST_REPEATS = 12
STEPS, COMPILING = "measured steps", "compiling"
"""What a search's real steps took, and what compiling them did."""

Choices = Mapping[str, Choice]
Confirm = Callable[[Choices, int, int], Measurement]  # choices, budget in bytes, steps


class Scorer(Protocol):
    """Judges the candidates of one search. ``source`` says what its numbers are; ``notes`` what people should know.

    The space counts as exhausted after ``most_repeats`` known plans in a row. ``worthwhile`` is the share of the step
    below which a gain is not worth a ghost run; ``most_candidates`` ends a search early where it is given.
    """

    source: PlanStatus
    most_repeats: int
    worthwhile: float
    most_candidates: int | None
    notes: list[str]

    def score(self, choices: Choices, predicted: Prediction, budget_bytes: int | None) -> Score:
        """Judge a plan that ``predicted`` says fits the device. ``budget_bytes``: a limit to hold where that is so."""
        ...

    def winner(self, book: Book, beside: Sequence[Trial], budget_bytes: int, seconds: float) -> Trial | None:
        """The plan to name, of those in the book that fit; None where none holds the budget.

        ``beside`` are well-known plans to time with the best; ``seconds`` are left to do so.
        """
        ...


def confirmation(
    spec: WorkloadSpec | None,
    measurer: Measurer,
    *,
    fixed: Choices | None = None,
    host_budget: int | None = None,
    compile: CompileMode | None = None,
) -> Confirm | None:
    """A run in a fresh process under a real limit, where the device has one. The CPU's peak is exact anyway.

    ``fixed`` are choices that every plan has besides its own. None for a live model, of which there is no second copy.
    """
    if spec is None or not isinstance(measurer, WorkerMeasurer) or not measurer.environment.device.enforces_limit:
        return None

    def confirm(choices: Choices, budget_bytes: int, steps: int) -> Measurement:
        measurer.rest()  # two processes on one device would take each other's memory
        with WorkerMeasurer(
            spec, measurer.device_name, budget_bytes=budget_bytes, host_budget=host_budget, compile=compile
        ) as fresh:
            return fresh.measure({**choices, **(fixed or {})}, steps=steps)

    return confirm


@dataclass
class RealSteps:
    """Candidates are measured; the best few once more side by side, the winner once more in a fresh process."""

    measurer: Measurer
    clock: Clock
    confirm: Confirm | None = None
    source: PlanStatus = "measured"
    most_repeats: int = MOST_REPEATS
    worthwhile: float = FASTER
    most_candidates: int | None = None
    notes: list[str] = field(default_factory=list)

    def score(self, choices: Choices, predicted: Prediction, budget_bytes: int | None) -> Score:
        """Real steps; running out of memory is a result."""
        steps = max(3, min(10, round(SECONDS_PER_TRIAL / max(predicted.step_seconds or 1.0, 1e-3))))
        try:
            with self.clock.part(STEPS):
                return Score("measured", self.measurer.measure(choices, steps=steps, budget_bytes=budget_bytes))
        except DeviceOutOfMemory as error:
            return Score("out_of_memory", message=error.message)

    def winner(self, book: Book, beside: Sequence[Trial], budget_bytes: int, seconds: float) -> Trial | None:
        """Measure the best few again side by side, confirm the winner, and return it with its final numbers."""
        finalists = book.ranking()[:FINALISTS]
        while finalists:
            winner = self._fastest(book, finalists, beside, seconds)
            if self.confirm is None or (winner := self._confirmed(book, winner, budget_bytes)).feasible:
                return winner
            finalists = [t for t in finalists if t.number != winner.number]
        return None

    def _fastest(self, book: Book, finalists: list[Trial], beside: Sequence[Trial], seconds: float) -> Trial:
        """The finalist that wins side by side; the times of the finals go into all trials that took part."""
        taking_part = {t.number for t in finalists}
        extra = [t for t in beside if t.measured is not None and t.number not in taking_part]
        with self.clock.part(STEPS):
            final = play(finalists, extra, self._side_by_side, seconds=min(FINAL_SECONDS, seconds))
        for number, times in final.times.items():
            trial = book.trials[number]
            book.put(trial.model_copy(update={"measured": remeasured(trial, times)}))
        if final.undecided:
            others = ", ".join(f"#{n}" for n in final.undecided)
            self.notes.append(f"trial #{final.winner} and {others} cannot be told apart at the noise of this machine")
        return book.trials[final.winner]

    def _side_by_side(self, plans: Mapping[str, Choices], rounds: int) -> Mapping[str, list[float]]:
        return self.measurer.compare(plans, rounds=rounds)

    def _confirmed(self, book: Book, winner: Trial, budget_bytes: int) -> Trial:
        """The winner after a run in a fresh process under the budget as a limit; infeasible if that did not hold."""
        assert self.confirm is not None and winner.measured is not None
        with suppress(DeviceOutOfMemory), self.clock.part(STEPS):
            again = self.confirm(winner.choices, budget_bytes, CONFIRMING_STEPS)
            if again.peak_bytes <= budget_bytes:
                peak = max(again.peak_bytes, winner.measured.peak_bytes)
                held = winner.measured.model_copy(update={"peak_bytes": peak})
                return book.put(winner.model_copy(update={"measured": held}))
        where = f"over {CONFIRMING_STEPS} steps in a fresh process"
        self.notes.append(f"trial #{winner.number} did not hold the budget {where}")
        return book.put(winner.model_copy(update={"feasible": False, "state": "out_of_memory", "measured": None}))


@dataclass
class Simulated:
    """Candidates are what their ghost runs and modelled op times say; nothing is measured, so nothing is repeated."""

    source: PlanStatus = "simulated"
    most_repeats: int = MOST_REPEATS // 3  # without noise the solver's prices are right from the start
    worthwhile: float = 1e-3  # no roofline tells plans apart that are closer
    most_candidates: int | None = None
    notes: list[str] = field(default_factory=list)

    def score(self, choices: Choices, predicted: Prediction, budget_bytes: int | None) -> Score:
        """The prediction stands."""
        return Score("simulated")

    def winner(self, book: Book, beside: Sequence[Trial], budget_bytes: int, seconds: float) -> Trial | None:
        """The fastest that fits."""
        return book.best
