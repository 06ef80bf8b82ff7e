from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

CONTRACT = "tests/policies/test_contract.py"
SOME = "(two_steps or autograd_grad or exception) and (offload or recompute) and (gpt2 or cnn)"


def test_some_of_the_contract(inside):
    inside(CONTRACT, "-k", SOME, schedule="lazy")


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ("lazy", "random:2", "compute-late"))
def test_all_of_the_contract(inside, schedule):
    inside(CONTRACT, schedule=schedule, timeout=3 * 3600)
