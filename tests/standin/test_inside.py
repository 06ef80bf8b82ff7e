"""Tests that run inside of a process that has the stand-in."""

import pytest

INSIDE = [f"tests/standin/inside/check_{name}.py" for name in ("device", "measuring", "streams", "sentinels")]
CONTRACT = "tests/policies/test_contract.py"
SHORT = "(check_ and not live and not predicted and not slow_link) or (two_steps and offload and gpt2)"


@pytest.mark.slow
def test_the_stand_in_and_a_part_of_the_contract(inside):
    """In one process, whose start takes longer than most of them.

    The first file imports transformers: garbage collections in the next ones then need not look through it, see
    ``tests.conftest``.
    """
    inside(*INSIDE, CONTRACT, "-k", SHORT)


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ("lazy", "random:2", "compute-late"))
def test_all_of_the_contract(inside, schedule):
    inside(CONTRACT, schedule=schedule, timeout=3 * 3600)


@pytest.mark.campaign
def test_every_plan_under_every_schedule(inside):
    inside(*INSIDE, STANDIN_ALL="1", timeout=2 * 3600)


@pytest.mark.campaign
def test_adaptive_training_by_the_allocators_own_counters(inside):
    inside("tests/standin/inside/check_adaptive.py", schedule="eager")
