"""Measuring until a ratio is known covers the truth as often as it says, and stops."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.evidence.until import compare_until
from tests.measuring.test_statistics import log_normal, share_covering


@pytest.mark.slow
def test_measuring_until_sure_keeps_its_promise_and_stops_early():
    rng = random.Random(1)
    results = [
        compare_until(lambda n: (log_normal(rng, n, 0.008), log_normal(rng, n, 0.008)), within=0.005)
        for _ in range(300)
    ]
    assert share_covering([r.ratio for r in results], 1.0) >= 0.90
    assert all(r.settled == (r.ratio.half_width <= 0.005) for r in results)
    assert all(10 <= r.rounds <= 60 for r in results)
    assert statistics.mean(r.rounds for r in results) < 50


def test_measuring_until_sure_says_when_the_rounds_ran_out():
    rng = random.Random(2)
    result = compare_until(lambda n: (log_normal(rng, n, 0.2), log_normal(rng, n, 0.2)), within=0.001, at_most=23)
    assert not result.settled
    assert result.rounds == 23 == len(result.base)
