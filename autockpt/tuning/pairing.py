"""Candidates are timed in turns with one plan that stays the same, so that a machine in use misleads nobody.

Trials are minutes apart, and what else runs meanwhile can double a step. Ratios to a plan that is timed right beside do
not see that, and all candidates' are to the same plan. A candidate that is surely slower than the best is let go after
its first pairs (racing: Maron & Moore 1994).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from autockpt.measuring import Measurer
from autockpt.schema import Choice, Measurement
from autockpt.tuning.book import Book

PRIOR_SCATTER, PRIOR_PAIRS = 0.02, 4  # of the logarithm of one pair's ratio; how many pairs that guess is worth
SURELY = 3.0  # standard errors

Choices = Mapping[str, Choice]


@dataclass
class Pairing:
    """Times candidates beside the first plan that was measured, for as long as it takes to know that they are slower.

    ``standard`` is that plan with its seconds. For devices where a plan's first cycle after another's is like its next.
    """

    measurer: Measurer
    standard: tuple[Choices, float] | None = None
    _book: Book | None = None
    _squares: float = PRIOR_PAIRS * PRIOR_SCATTER**2
    _freedom: float = PRIOR_PAIRS

    def begin(self, book: Book) -> None:
        """Keep to the plan that earlier trials were timed beside; the best of ``book`` is what others race against."""
        self._book = book
        first = next((t for t in book.trials if t.measured is not None and not t.measured.beside), None)
        if first is not None and first.measured is not None:
            self.standard = first.choices, statistics.median(first.measured.times or (first.measured.step_seconds,))

    @property
    def scatter(self) -> float:
        """Standard deviation of the logarithm of one pair's ratio, over all pairs of this search."""
        return math.sqrt(self._squares / self._freedom)

    def measure(self, choices: Choices, *, pairs: int, budget_bytes: int | None) -> Measurement:
        """Peak and seconds of a candidate, in at most so many pairs.

        Raises what ``Measurer.measure`` raises.
        """
        if self.standard is None:
            alone = self.measurer.measure(choices, steps=pairs + 1, budget_bytes=budget_bytes)
            self.standard = dict(choices), alone.step_seconds
            return alone
        standard, seconds = self.standard
        first = self.measurer.measure(choices, steps=1, budget_bytes=budget_bytes)
        ours, beside = list(first.times), self._turns({"standard": standard}, budget_bytes)["standard"]
        while len(ours) < pairs and not self._slower(ours, beside):
            times = self._turns({"candidate": choices, "standard": standard}, budget_bytes)
            ours, beside = [*ours, *times["candidate"]], [*beside, *times["standard"]]
        logs = _logs(ours, beside)
        self._learn(logs)
        return first.model_copy(
            update={
                "step_seconds": math.exp(statistics.fmean(logs)) * seconds,
                "noise": min(1.0, 2 * self.scatter / math.sqrt(len(logs))),
                "steps": len(ours),
                "times": tuple(ours),
                "beside": tuple(beside),
            }
        )

    def _turns(self, plans: Mapping[str, Choices], budget_bytes: int | None) -> dict[str, list[float]]:
        return self.measurer.compare(plans, rounds=1, warmup=0, budget_bytes=budget_bytes)

    def _slower(self, ours: list[float], beside: list[float]) -> bool:
        """Whether the candidate is surely slower than the best of the book."""
        best = self._book.best if self._book is not None else None
        if best is None or self.standard is None:
            return False
        behind = statistics.fmean(_logs(ours, beside)) - math.log(best.score_seconds / self.standard[1])
        return behind > SURELY * self.scatter / math.sqrt(len(ours))

    def _learn(self, logs: list[float]) -> None:
        mean = statistics.fmean(logs)
        self._squares += sum((value - mean) ** 2 for value in logs)
        self._freedom += len(logs) - 1


def _logs(ours: list[float], beside: list[float]) -> list[float]:
    return [math.log(a / b) for a, b in zip(ours, beside, strict=True)]
