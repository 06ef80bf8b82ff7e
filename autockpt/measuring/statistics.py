"""Confidence intervals of medians and of paired ratios.

Times are seconds. Every interval is a two-sided 95 % confidence interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

CONFIDENCE = 0.95
# A distribution-free 95 % interval needs six values: the smallest and the largest of n enclose the median with
# probability 1 - 2 / 2**n, which is 0.9375 for five.
MIN_FREE = 6
# Student's t at 97.5 % for two to five values, which have one to four degrees of freedom.
_T_QUANTILES = (12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934)


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval, all in the unit of what was measured. Infinite ends: nothing is known."""

    low: float
    value: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width as a share of the value: 0.01 reads ± 1 %."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else math.inf

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def median_interval(times: Sequence[float]) -> Interval:
    """The median of positive ``times`` and its interval.

    From six times on by order statistics, interpolated (Hettmansperger & Sheather 1986), which assumes nothing of the
    distribution. Below six no such interval exists, so it is Student's t on the logarithms, which assumes log-normal
    noise. One time gives an unbounded interval. Raises ValueError without any times or where one is not positive.
    """
    _check(times)
    middle = statistics.median(times)
    if len(times) == 1:
        return Interval(0.0, middle, math.inf)
    if len(times) < MIN_FREE:
        mean, reach = _t_reach([math.log(t) for t in times])
        # Around the mean of the logarithms, as far as it reaches, but never leaving the median outside.
        return Interval(min(middle, math.exp(mean - reach)), middle, max(middle, math.exp(mean + reach)))
    ordered = sorted(times)
    n, depth, inner = len(ordered), *_depth(len(ordered))
    low = ordered[depth - 1] + inner * (ordered[depth] - ordered[depth - 1])
    high = ordered[n - depth] + inner * (ordered[n - depth - 1] - ordered[n - depth])
    return Interval(min(low, middle), middle, max(high, middle))


def noise(times: Sequence[float]) -> float:
    """Half the width of the median's interval as a share of the median; at most 1, which says: nothing is known."""
    return min(1.0, median_interval(times).half_width)


def ratio_interval(ours: Sequence[float], base: Sequence[float]) -> Interval:
    """How many times as long ``ours`` takes as ``base``, from paired times: ours[i] was measured right next to base[i].

    Pairing removes whatever slows both. The Hodges-Lehmann estimate of the ratio with the interval of the signed-rank
    test (Hodges & Lehmann 1963), which single disturbed rounds hardly move; below six pairs the geometric mean with
    Student's t interval on the logarithms. Raises ValueError where the numbers of times differ, there are none, or one
    is not positive.
    """
    if len(ours) != len(base):
        raise ValueError(f"paired times are needed: {len(ours)} and {len(base)} were given")
    _check(ours)
    _check(base)
    logs = [math.log(a / b) for a, b in zip(ours, base, strict=True)]
    if len(logs) == 1:
        return Interval(0.0, math.exp(logs[0]), math.inf)
    if len(logs) >= MIN_FREE:
        low, middle, high = _signed_rank(logs)
        return Interval(math.exp(low), math.exp(middle), math.exp(high))
    mean, reach = _t_reach(logs)
    return Interval(math.exp(mean - reach), math.exp(mean), math.exp(mean + reach))


def _t_reach(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the reach of its interval to either side."""
    n = len(values)
    return statistics.fmean(values), _T_QUANTILES[n - 2] * statistics.stdev(values) / math.sqrt(n)


def _depth(n: int) -> tuple[int, float]:
    """Which order statistic bounds the median, counted from 1 at either end, and how far to move towards the next.

    The depth is the largest whose plain interval still has the confidence; the share in [0, 1) uses up what is left.
    """
    tails = list(accumulate(math.comb(n, k) / 2**n for k in range(n // 2 + 1)))
    depth = max(d for d in range(1, n // 2 + 1) if d == 1 or 1 - 2 * tails[d - 1] >= CONFIDENCE)
    coverage, following = 1 - 2 * tails[depth - 1], 1 - 2 * tails[depth]
    share = (coverage - CONFIDENCE) / (coverage - following)
    return depth, (n - depth) * share / (depth + (n - 2 * depth) * share)


def _signed_rank(values: Sequence[float]) -> tuple[float, float, float]:
    """Low end, Hodges-Lehmann estimate and high end from the Walsh averages."""
    n = len(values)
    walsh = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    cut = max(_rank_cut(n, (1 - CONFIDENCE) / 2), 1)
    return walsh[cut - 1], statistics.median(walsh), walsh[len(walsh) - cut]


def _rank_cut(n: int, tail: float) -> int:
    """Which Walsh average bounds the interval, counted from 1 at either end: the largest c with P(W < c) <= tail."""
    pairs = n * (n + 1) // 2
    ways = [1] + [0] * pairs  # ways[w]: subsets of the ranks 1..n whose sum is w
    for rank in range(1, n + 1):
        ways = [with_rank + without for with_rank, without in zip([0] * rank + ways, ways, strict=False)]
    return sum(below <= tail * 2**n for below in accumulate(ways))


def _check(times: Sequence[float]) -> None:
    if not times:
        raise ValueError("no times were given")
    if not all(t > 0 and math.isfinite(t) for t in times):
        raise ValueError("times must be positive, finite seconds")
