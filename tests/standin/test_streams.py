from __future__ import annotations

import pytest


@pytest.mark.campaign
def test_every_plan_under_every_schedule(inside):
    inside("tests/standin/inside/check_streams.py", STANDIN_ALL="1", timeout=3600)
