from __future__ import annotations

import pytest


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ("lazy", "random:2", "compute-late"))
def test_all_of_the_contract(inside, schedule):
    inside("tests/policies/test_contract.py", schedule=schedule, timeout=3 * 3600)
