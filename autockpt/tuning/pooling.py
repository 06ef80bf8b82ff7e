"""What steps and prices together say of plans that steps alone cannot distinguish.

The fastest of several noisy measurements is fast by luck as well (the winner's curse). What each plan should take, by
its simulated step and by prices that were fitted to all trials, is wrong too, but not by the same luck: both are
averaged on the logarithm, each with the weight of one over its variance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autockpt.schema import Problem, Trial
from autockpt.tuning.refit import Fit, fit, noise_of, priced

FORESIGHT, GUESSES = 0.007, 4
"""What predictions are off by, one standard deviation as a share, and how many misses that guess is worth."""


@dataclass(frozen=True)
class ForeseenTimes:
    """Step seconds that are expected of trials, by number, and what they are off by: one standard deviation, a share.

    Only their ratios count.
    """

    seconds: dict[int, float]
    error: float

    def weigh(self, measured: Mapping[int, float], error: Mapping[int, float]) -> dict[int, float]:
        """Step seconds by both. ``measured`` are off by ``error``, one standard deviation as a share, by number.

        A trial of which nothing is expected keeps what was measured.
        """
        both = [n for n in measured if n in self.seconds]
        if not both:
            return dict(measured)
        level = statistics.median(math.log(measured[n] / self.seconds[n]) for n in both)
        weighed = dict(measured)
        for n in both:
            trust = self.error**2 / (self.error**2 + error[n] ** 2)
            expected = level + math.log(self.seconds[n])
            weighed[n] = math.exp(trust * math.log(measured[n]) + (1 - trust) * expected)
        return weighed


def foreseen(problem: Problem, trials: Sequence[Trial]) -> ForeseenTimes:
    """What is expected of measured trials, by all of them. ``problem`` must carry unscaled prices.

    A simulated step stands as it is, but for the fitted prices' difference from the profile's.
    """
    scored = [t for t in trials if t.measured is not None and priced(problem, t.choices)]
    fitted, profile = fit(problem, scored), Fit(problem.base_seconds)
    seconds: dict[int, float] = {}
    for trial in scored:
        expected = fitted.predict(problem, trial.choices)
        if trial.predicted is not None and trial.predicted.step_seconds is not None:
            prices = fitted.predict(problem, trial.choices) - profile.predict(problem, trial.choices)
            simulated = trial.predicted.step_seconds + prices
            expected = simulated if simulated > 0 else expected
        seconds[trial.number] = max(expected, 1e-9)
    misses = [math.log(t.score_seconds / seconds[t.number]) for t in scored]
    middle = statistics.median(misses) if misses else 0.0
    beyond = sum(max(0.0, (miss - middle) ** 2 - noise_of(t) ** 2) for miss, t in zip(misses, scored, strict=True))
    return ForeseenTimes(seconds, math.sqrt((GUESSES * FORESIGHT**2 + beyond) / (GUESSES + len(misses))))
