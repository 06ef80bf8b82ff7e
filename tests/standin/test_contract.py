from __future__ import annotations

import pytest

pytestmark = pytest.mark.campaign

CONTRACT = "tests/policies/test_contract.py"
MOVING = "(offload or recompute) and (gpt2 or cnn)"


@pytest.mark.parametrize(
    ("schedule", "tests"),
    [
        ("lazy", f"two_steps and {MOVING}"),
        ("random:1", f"every_other or double_backward or shared_and_skipped or (copies_and_pickles and {MOVING})"),
        ("copies-late", f"(autograd_grad or exception or used_twice) and {MOVING}"),
    ],
)
def test_some_of_the_contract(inside, schedule, tests):
    inside(CONTRACT, "-k", tests, schedule=schedule)


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ("lazy", "random:2", "compute-late"))
def test_all_of_the_contract(inside, schedule):
    inside(CONTRACT, schedule=schedule, timeout=3600)
