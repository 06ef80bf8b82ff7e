"""The finals: the best few plans are measured again, interleaved with saving everything, before one is named.

Trials are minutes apart, and what else runs meanwhile can double a step; rounds in which every plan takes its turn do
not see that. Among many noisy measurements the smallest is too small (the winner's curse): the name goes to the plan
that wins when all contenders are interleaved, predictions taken into account. Rounds go on while what they would tell
may be worth it (knowledge gradient: Frazier, Powell and Dayanik 2008; racing: Maron & Moore 1994).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from autockpt.measuring.statistics import noise, ratio_interval
from autockpt.schema import Choice, Measurement, Trial

FINALISTS = 3
WORTH = 0.001  # of the step: plans that are expected to be faster than the best by less take no part
EXPECTED_WITHIN = 0.01  # one standard deviation of predicted ratios of step times, as a share
BATCH = 3
MOST_ROUNDS = 15

Choices = Mapping[str, Choice]


Compare = Callable[..., Mapping[str, Sequence[float]]]  # plans by name, rounds= -> seconds


@dataclass(frozen=True)
class Final:
    """Outcome of the finals. ``times`` are interleaved seconds per trial number, round by round from the first on, of
    some more rounds than of others; those of ``last`` were in all of them."""

    times: dict[int, list[float]]
    last: tuple[int, ...]

    def seconds(self, number: int) -> float:
        """Step seconds of one that took part: by its ratio to one of the last in the rounds that both have, so that all
        are of the same conditions. Medians, as one disturbed step of few must not move the others' seconds."""
        base, ours = self.times[self.last[0]], self.times[number]
        return statistics.median(base) * statistics.median(a / b for a, b in zip(ours, base, strict=False))

    def ratio(self, number: int) -> float:
        """The same as a multiple of that of one of the last, known within ``error``."""
        base, ours = self.times[self.last[0]], self.times[number]
        both = min(len(ours), len(base))
        return ratio_interval(ours[:both], base[:both]).value

    @property
    def error(self) -> float:
        """One standard deviation, as a share, of what the last took, without what was common to their rounds."""
        logs = np.log([self.times[number] for number in self.last])
        plans, rounds = logs.shape
        if rounds < 2 or plans < 2:
            return 0.0
        rest = logs - logs.mean(axis=0)
        rest -= rest.mean(axis=1, keepdims=True)
        return math.sqrt((rest**2).sum() / ((plans - 1) * (rounds - 1)) / rounds)


def race(
    candidates: Sequence[Trial],
    extra: Sequence[Trial],
    compare: Compare,
    expected: Mapping[int, float],
    *,
    seconds: float,
) -> Final:
    """Interleave ``candidates`` (one of them wins) and, in the first rounds, ``extra`` (measured for the table).

    Rounds go on with the few that a further batch may show to be the fastest, by what was measured and ``expected``; at
    most ``MOST_ROUNDS``, and ``seconds`` of wall time after the first few, which no batch of rounds is begun to exceed.
    """
    choices = {t.number: t.choices for t in (*candidates, *extra)}
    times: dict[int, list[float]] = {number: [] for number in choices}
    playing, rivals = list(choices), [t.number for t in candidates]
    end = math.inf
    while True:
        began = time.monotonic()
        for name, values in compare({str(n): choices[n] for n in playing}, rounds=BATCH).items():
            times[int(name)].extend(values)
        now = time.monotonic()
        end, each = min(end, now + seconds), (now - began) / len(playing)
        final = Final(times, tuple(rivals))
        rivals = _worth_a_batch(final, expected)
        if len(rivals) == 1 or len(times[rivals[0]]) >= MOST_ROUNDS or now + each * len(rivals) > end:
            return final
        playing = rivals


def _worth_a_batch(final: Final, expected: Mapping[int, float]) -> list[int]:
    """The leader, and those that another batch of rounds may show to be faster by what it would tell."""
    rounds, error = len(final.times[final.last[0]]), final.error
    after = error * math.sqrt(rounds / (rounds + BATCH))
    told = math.sqrt(weighed_error(error, expected) ** 2 - weighed_error(after, expected) ** 2)
    return _close({n: final.ratio(n) for n in final.last}, expected, error, told)


def gain(slower: float, error: float) -> float:
    """By how much a plan is expected to turn out faster than another, as a share of the step; 0 if it surely is not.

    It seems to be ``slower`` by so much, known within one standard deviation ``error``.
    """
    if error <= 0:
        return max(0.0, -slower)
    normal = statistics.NormalDist()
    return error * normal.pdf(slower / error) - slower * normal.cdf(-slower / error)


def weighed(times: Mapping[int, float], expected: Mapping[int, float], error: float) -> dict[int, float]:
    """Step seconds by what was measured, within ``error`` (a share), and by what was ``expected``, by trial number.

    Both are averaged on the logarithm, each with the weight of one over its variance: the fastest of several noisy
    measurements is fast by luck as well, and predictions are off by other luck. Those of which nothing is expected keep
    what was measured.
    """
    both = [n for n in times if n in expected]
    trust = EXPECTED_WITHIN**2 / (EXPECTED_WITHIN**2 + error**2)
    level = statistics.median(times[n] / expected[n] for n in both) if both else 1.0
    return {n: t * (level * expected[n] / t) ** (1 - trust) if n in expected else t for n, t in times.items()}


def weighed_error(error: float, expected: Mapping[int, float]) -> float:
    """One standard deviation of what ``weighed`` gives, as a share."""
    return EXPECTED_WITHIN * error / math.hypot(EXPECTED_WITHIN, error) if expected else error


def contenders(times: Mapping[int, float], error: float, *predictions: Mapping[int, float]) -> list[int]:
    """The numbers of the few trials that may be the fastest, by what was measured and any of these ``predictions``.

    ``times`` and ``error`` as for ``weighed``, whose fastest by each of the predictions come first. Without any
    expectation, ``{}``, that is the fastest as measured.
    """
    found = [_close(times, expected, error, weighed_error(error, expected)) for expected in predictions]
    return [n for n in dict.fromkeys(chain.from_iterable(zip_longest(*found))) if n is not None][:FINALISTS]


def _close(times: Mapping[int, float], expected: Mapping[int, float], error: float, moves: float) -> list[int]:
    """The fastest as ``weighed``, and those that would be faster by enough if both were off by ``moves``, a share."""
    both = weighed(times, expected, error)
    best, *others = sorted(both, key=lambda n: both[n])
    return [best, *(n for n in others if gain(both[n] / both[best] - 1, math.sqrt(2) * moves) > WORTH)]


def first_rounds(trials: Sequence[Trial]) -> float:
    """Seconds that the first rounds of the finals take, all or nothing: a cycle to warm up and a timed one each."""
    return 2 * BATCH * sum(t.score_seconds for t in trials if t.measured is not None)


def remeasured(measured: Measurement, number: int, final: Final) -> Measurement:
    """A trial's measurement with the times of the finals in place of its first ones; the peak stands."""
    times = final.times[number]
    return measured.model_copy(
        update={
            "step_seconds": final.seconds(number),
            "noise": noise(times),
            "steps": len(times),
            "times": tuple(times),
        }
    )
