from __future__ import annotations

import pytest

pytestmark = pytest.mark.campaign

MEASURING = "tests/standin/inside/check_measuring.py"


def test_a_live_search(inside):
    inside(MEASURING, "-k", "live")


def test_peaks_of_many_plans(inside):
    inside(MEASURING, "-k", "predicted or slow_link", timeout=3600, STANDIN_ALL="1")
