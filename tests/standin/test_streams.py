from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SCENARIOS = "tests/standin/inside/check_streams.py"


def test_what_people_do_with_streams_threads_and_graphs_and_sentinels_on_them(inside):
    inside(SCENARIOS, "tests/standin/inside/check_sentinels.py")


@pytest.mark.campaign
def test_every_plan_under_every_schedule(inside):
    inside(SCENARIOS, STANDIN_ALL="1", timeout=3600)
