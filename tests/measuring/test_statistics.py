"""Intervals cover the truth as often as they say."""

import math
import random
import statistics as plain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.measuring.statistics import Interval, median_interval, noise, ratio_interval

seconds = st.floats(1e-6, 1e4, allow_nan=False)
DRAWS = 1500


def log_normal(rng: random.Random, n: int, spread: float = 0.02) -> list[float]:
    return [math.exp(rng.gauss(0.0, spread)) for _ in range(n)]


def skewed(rng: random.Random, n: int) -> list[float]:
    """Steps as a shared machine gives them: a floor, and now and then something in the way. The median is 1."""
    return [1 + 0.05 * (rng.expovariate(1.0) - math.log(2)) for _ in range(n)]


def share_covering(intervals: list[Interval], truth: float) -> float:
    return sum(i.low <= truth <= i.high for i in intervals) / len(intervals)


@pytest.mark.parametrize("draw", [log_normal, skewed])
@pytest.mark.parametrize("n", [5, 6, 7, 10, 21])
def test_median_interval_covers_the_median_95_times_in_100(draw, n):
    rng = random.Random(n)
    covering = share_covering([median_interval(draw(rng, n)) for _ in range(DRAWS)], 1.0)
    assert 0.925 <= covering <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 6, 10, 30])
def test_ratio_intervals_cover_95_in_100_under_drift(n):
    rng = random.Random(n)
    found = []
    for _ in range(DRAWS // 2):
        drift = [math.exp(rng.gauss(0.0, 0.3)) for _ in range(n)]
        ours = [1.1 * d * t for d, t in zip(drift, log_normal(rng, n), strict=True)]
        base = [d * t for d, t in zip(drift, log_normal(rng, n), strict=True)]
        found.append(ratio_interval(ours, base))
    assert 0.925 <= share_covering(found, 1.1) <= 0.985


def test_two_disturbed_rounds_hardly_move_the_interval():
    rng = random.Random(0)
    base, ours = log_normal(rng, 20, 0.005), log_normal(rng, 20, 0.005)
    ours[3], ours[11] = 5.0, 8.0
    ratio = ratio_interval(ours, base)
    assert ratio.half_width < 0.01
    assert abs(ratio.value - 1) < 0.01


@given(st.lists(seconds, min_size=1, max_size=60))
def test_the_median_lies_in_its_interval(times):
    interval = median_interval(times)
    assert interval.low <= interval.value <= interval.high
    assert interval.value == plain.median(times)
    assert 0.0 <= noise(times) <= 1.0


def test_known_intervals_by_hand():
    # Six times: the plain interval is [min, max] with 96.9 %, so 95 % lies a little inside.
    six = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (six.low, six.value, six.high) == (pytest.approx(1.357, abs=1e-3), 3.5, pytest.approx(5.643, abs=1e-3))
    # Two ratios of 1 and e**2: mean log 1, t(0.975, 1) = 12.706, standard error 1.
    two = ratio_interval([1.0, math.e**2], [1.0, 1.0])
    assert math.log(two.low) == pytest.approx(1 - 12.7062, abs=1e-3)
    assert median_interval([3.0]) == Interval(0.0, 3.0, math.inf)
    assert noise([3.0]) == 1.0


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_impossible_times_are_refused(times):
    with pytest.raises(ValueError):
        median_interval(times)
    with pytest.raises(ValueError):
        ratio_interval(times, times)
