from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

DEVICE, MEASURING = "tests/standin/inside/check_device.py", "tests/standin/inside/check_measuring.py"
CONTRACT = "tests/policies/test_contract.py"
SOME = "(two_steps or autograd_grad or exception) and (offload or recompute) and (gpt2 or cnn)"


def test_the_stand_in_itself_real_steps_under_a_real_limit_and_some_of_the_contract(inside):
    """In one process, whose start takes longer than most of them.

    The first file imports transformers: garbage collections in the second then need not look through it, see
    ``tests.conftest``.
    """
    some = f"check_device or (check_measuring and not live) or ({SOME})"
    inside(DEVICE, MEASURING, CONTRACT, "-k", some, schedule="lazy")


@pytest.mark.campaign
def test_a_live_search(inside):
    inside(MEASURING, "-k", "live")


@pytest.mark.campaign
def test_peaks_of_many_plans(inside):
    inside(MEASURING, "-k", "predicted or slow_link", STANDIN_ALL="1")
