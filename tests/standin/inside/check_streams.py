"""Scenarios under plans that move activations: bits of plain training, and no race, under every schedule."""

import pytest
import torch

from tests.standin.inside import scenarios
from tests.standin.inside.scenarios import ALL, PLANS, SCENARIOS, Block, Counting, Twofold, generated, run

standin = torch.get_device_module("standin")
SCHEDULES = ("lazy", "random:1", "copies-late", "compute-late", "random:2", "eager")
GENERATED = range(48 if ALL else 4)


def _some(turn):
    """Of three scenarios one after the other each has other plans."""
    return list(PLANS) if ALL else list(PLANS)[turn % 3 :: 3]


def _check(scenario, turn, block=Block, plans=()):
    """``turn`` says which schedule which plan runs under, where not all do."""
    standin.set_schedule("random:7")
    wanted = run(scenario, None, block)
    standin.synchronize()
    assert not standin.races()  # of the scenario's own making
    for n, plan in enumerate(plans or _some(turn)):
        for schedule in SCHEDULES if ALL else (SCHEDULES[(turn + n) % len(SCHEDULES)],):
            standin.set_schedule(schedule)
            got = run(scenario, PLANS[plan], block)
            standin.synchronize()
            assert got.keys() == wanted.keys()
            wrong = [key for key in wanted if not torch.equal(got[key], wanted[key])]
            assert not wrong and not standin.races(), (schedule, plan, wrong, standin.races())


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    _check(SCENARIOS[name], list(SCENARIOS).index(name))


def test_one_saved_tensor_is_read_on_two_streams():
    _check(scenarios.step, 0, Twofold)


@pytest.mark.parametrize("name", ("twice", "batches of all lengths", "units on two streams", "partial backward"))
def test_state_that_forward_changes_on_a_stream_of_its_own(name):
    turn = list(SCENARIOS).index(name) + 1
    _check(SCENARIOS[name], turn, Counting, plans=[plan for plan in _some(turn) if plan != "made again"])


@pytest.mark.parametrize("seed", GENERATED)
def test_generated_scenario(seed):
    names = list(PLANS)[:5]
    block = (Block, Block, Twofold, Counting)[seed % 4]
    plans = names if ALL else (names[seed % 5], names[(seed + 2) % 5])
    _check(generated(seed, block), seed, block, plans=[*plans, "made again"] if block is Block else plans)
