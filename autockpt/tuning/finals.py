"""The finals: the best few plans are measured again, interleaved with saving everything, before one is named.

Trials are minutes apart, and other work on the machine can double a step. It affects all plans alike when they are
interleaved. Among many noisy measurements the smallest is too small (the winner's curse), so predictions are taken into
account as well. Rounds continue while they are expected to change the answer (knowledge gradient: Frazier, Powell and
Dayanik 2008; racing: Maron & Moore 1994).
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
from autockpt.schema import Measurement, Trial

FINALISTS = 3
WORTH = 0.001  # share of the step by which a plan must be expected to be faster than the best to take part
EXPECTED_WITHIN = 0.01  # one standard deviation of predicted ratios of step times, as a share
BATCH = 3
MOST_ROUNDS = 15


Compare = Callable[..., Mapping[str, Sequence[float]]]  # plans by name, rounds= -> seconds


@dataclass(frozen=True)
class Final:
    """The measured rounds. ``times`` are interleaved seconds by trial number, from the first round on.

    Trials that were ruled out have fewer of them; the trials of ``last`` were in all rounds.
    """

    times: dict[int, list[float]]
    last: tuple[int, ...]

    def seconds(self, number: int) -> float:
        """Step seconds of a trial, by its ratio to one of the ``last`` in their common rounds.

        So all seconds are under the same conditions. Medians, as a single disturbed step must not change them.
        """
        base, ours = self.times[self.last[0]], self.times[number]
        return statistics.median(base) * statistics.median(a / b for a, b in zip(ours, base, strict=False))

    def ratio(self, number: int) -> float:
        """A trial's step as a multiple of that of one of the ``last``, with the uncertainty ``error``."""
        base, ours = self.times[self.last[0]], self.times[number]
        both = min(len(ours), len(base))
        return ratio_interval(ours[:both], base[:both]).value

    @property
    def error(self) -> float:
        """One standard deviation of the steps of the ``last``, as a share, without the common drift of rounds."""
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
    """Interleave ``candidates``, of which one wins, and in the first rounds ``extra``, which are timed for the table.

    Further batches of rounds are for candidates that may still turn out to be the fastest, by what was measured and
    ``expected``. There are at most ``MOST_ROUNDS``, and no batch is begun that would exceed ``seconds`` of wall time
    after the first.
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
    """The leader, and trials that another batch of rounds may show to be faster."""
    rounds, error = len(final.times[final.last[0]]), final.error
    after = error * math.sqrt(rounds / (rounds + BATCH))
    change = math.sqrt(weighed_error(error, expected) ** 2 - weighed_error(after, expected) ** 2)
    return _close({n: final.ratio(n) for n in final.last}, expected, error, change)


def gain(slower: float, error: float) -> float:
    """The expected improvement of a plan over another, as a share of the step; 0 where it surely is slower.

    By what is known it is ``slower`` by that share, with a standard deviation of ``error``.
    """
    if error <= 0:
        return max(0.0, -slower)
    normal = statistics.NormalDist()
    return error * normal.pdf(slower / error) - slower * normal.cdf(-slower / error)


def weighed(times: Mapping[int, float], expected: Mapping[int, float], error: float) -> dict[int, float]:
    """Step seconds by trial number: measured ones, with a relative ``error``, combined with ``expected`` ones.

    Logarithms are averaged with the inverse variances as weights, as the fastest of several noisy measurements is so
    partly by chance, and predictions err independently. Trials without a prediction keep what was measured.
    """
    both = [n for n in times if n in expected]
    trust = EXPECTED_WITHIN**2 / (EXPECTED_WITHIN**2 + error**2)
    level = statistics.median(times[n] / expected[n] for n in both) if both else 1.0
    return {n: t * (level * expected[n] / t) ** (1 - trust) if n in expected else t for n, t in times.items()}


def weighed_error(error: float, expected: Mapping[int, float]) -> float:
    """One standard deviation of the result of ``weighed``, as a share."""
    return EXPECTED_WITHIN * error / math.hypot(EXPECTED_WITHIN, error) if expected else error


def contenders(times: Mapping[int, float], error: float, *predictions: Mapping[int, float]) -> list[int]:
    """The numbers of the few trials that may be the fastest, by their measured ``times`` and any of the
    ``predictions``.

    ``times`` and ``error`` as for ``weighed``. The fastest by each of the predictions come first; an empty prediction
    stands for the measurements alone.
    """
    found = [_close(times, expected, error, weighed_error(error, expected)) for expected in predictions]
    return [n for n in dict.fromkeys(chain.from_iterable(zip_longest(*found))) if n is not None][:FINALISTS]


def _close(times: Mapping[int, float], expected: Mapping[int, float], error: float, moves: float) -> list[int]:
    """The fastest as ``weighed``, and trials that may be faster by enough if both times change by a share ``moves``."""
    both = weighed(times, expected, error)
    best, *others = sorted(both, key=lambda n: both[n])
    return [best, *(n for n in others if gain(both[n] / both[best] - 1, math.sqrt(2) * moves) > WORTH)]


def first_rounds(trials: Sequence[Trial]) -> float:
    """Seconds that the first rounds of the finals take, all or nothing: a cycle to warm up and a timed one each."""
    return 2 * BATCH * sum(t.score_seconds for t in trials if t.measured is not None)


def remeasured(measured: Measurement, number: int, final: Final) -> Measurement:
    """A trial's measurement with the times of the finals; its peak stays."""
    times = final.times[number]
    return measured.model_copy(
        update={
            "step_seconds": final.seconds(number),
            "noise": noise(times),
            "steps": len(times),
            "times": tuple(times),
        }
    )
