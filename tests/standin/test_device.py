from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_the_stand_in_itself(inside):
    inside("tests/standin/inside/check_device.py")
