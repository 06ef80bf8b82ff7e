from __future__ import annotations

import pytest

pytestmark = pytest.mark.campaign


def test_by_the_allocators_own_counters(inside):
    inside("tests/standin/inside/check_adaptive.py", schedule="eager")
