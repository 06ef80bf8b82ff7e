from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

MEASURING = "tests/standin/inside/check_measuring.py"


def test_real_steps_under_a_real_limit(inside):
    inside(MEASURING, "-k", "not live")


@pytest.mark.campaign
def test_a_live_search(inside):
    inside(MEASURING, "-k", "live")


@pytest.mark.campaign
def test_peaks_of_many_plans(inside):
    inside(MEASURING, "-k", "predicted or slow_link", STANDIN_ALL="1")
