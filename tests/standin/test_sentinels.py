from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_sentinels_on_streams(inside):
    inside("tests/standin/inside/check_sentinels.py")
