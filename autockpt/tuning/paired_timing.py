"""Candidates are timed interleaved with one reference plan, so that a machine in use misleads nobody.

Trials are minutes apart, and what else runs meanwhile can double a step. Ratios to a plan that is timed right before
and right after do not see that, and all candidates' are to the same plan.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autockpt.measuring import Measurer
from autockpt.schema import Choice, Measurement, Trial, plan_hash
from autockpt.tuning.trials import Trials

PRIOR_SCATTER, PRIOR_CYCLES = 0.015, 4  # of the logarithm of one cycle's seconds; how many cycles that guess is worth
FRESH = 15.0  # seconds that a reading of the standard holds for what comes next

Choices = Mapping[str, Choice]


@dataclass
class Pairing:
    """Times candidates interleaved with the first plan that was measured, the ``standard``: its choices and seconds.

    For devices where the standard needs no warm-up after another plan, as the CPU and plans that move nothing.
    """

    measurer: Measurer
    standard: tuple[Choices, float] | None = None
    _last: tuple[float, ...] = ()
    _taken: float = -math.inf
    _squares: float = PRIOR_CYCLES * PRIOR_SCATTER**2
    _freedom: float = PRIOR_CYCLES

    def begin(self, trials: Trials) -> None:
        """Keep to the plan that earlier trials were timed against."""
        first = next((t for t in trials.all if t.measured is not None and not t.measured.beside), None)
        if first is not None and first.measured is not None:
            self.standard = first.choices, first.measured.step_seconds

    def is_standard(self, trial: Trial) -> bool:
        """Whether others were timed against this trial's plan."""
        return self.standard is not None and plan_hash(self.standard[0]) == trial.plan_hash

    def measure(self, choices: Choices, *, steps: int, budget_bytes: int | None) -> Measurement:
        """Peak and seconds of a candidate over ``steps`` timed cycles; of the standard about as many.

        Raises what ``Measurer.measure`` raises.
        """
        if self.standard is None:
            alone = self.measurer.measure(choices, steps=steps + 1, budget_bytes=budget_bytes)
            # what it takes right after a switch, as from now on
            self.standard = dict(choices), statistics.median(self._read(choices, steps, budget_bytes))
            return alone
        standard, seconds = self.standard
        before = self._last if time.monotonic() - self._taken <= FRESH else self._read(standard, steps, budget_bytes)
        measured = self.measurer.measure(choices, steps=steps, budget_bytes=budget_bytes)
        beside = (*before, *self._read(standard, steps, budget_bytes))
        ours = measured.times or (measured.step_seconds,)
        self._learn(ours)
        self._learn(beside)
        ratio = math.exp(_mean_log(ours) - _mean_log(beside))
        # standard deviation of the logarithm of one cycle's seconds, over all trials of this search
        scatter = math.sqrt(self._squares / self._freedom)
        noise = 2 * scatter * math.sqrt(1 / len(ours) + 1 / len(beside))
        return measured.model_copy(
            update={"step_seconds": ratio * seconds, "noise": min(1.0, noise), "beside": tuple(beside)}
        )

    def _read(self, standard: Choices, steps: int, budget_bytes: int | None) -> tuple[float, ...]:
        """Cycles of the standard, half as many as the candidate's."""
        rounds = max(1, steps // 2)
        times = self.measurer.compare({"standard": standard}, rounds=rounds, warmup=0, budget_bytes=budget_bytes)
        self._last, self._taken = tuple(times["standard"]), time.monotonic()
        return self._last

    def _learn(self, times: Sequence[float]) -> None:
        mean = _mean_log(times)
        self._squares += sum((math.log(t) - mean) ** 2 for t in times)
        self._freedom += len(times) - 1


def _mean_log(times: Sequence[float]) -> float:
    return statistics.fmean(map(math.log, times))
