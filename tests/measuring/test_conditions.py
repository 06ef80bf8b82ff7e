"""Equal conditions for every cycle."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from autockpt.measuring import conditions
from tests.measuring.small_workloads import Stack, make_workload


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_generator_starts_from_the_seed():
    states = np.random.get_state()
    conditions.seed_all(7, torch.device("cpu"))
    first = draws()
    conditions.seed_all(7, torch.device("cpu"))
    assert draws() == first
    conditions.seed_all(8, torch.device("cpu"))
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    np.random.set_state(states)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax"])
def test_held_weights_do_not_move_and_states_do(name):
    model = Stack()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    workload = make_workload(model, optimizer=optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with conditions.weights_held(optimizer):
        workload.cycle()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    workload.cycle()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_learning_rates_come_back_after_errors():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([{"params": weights[:1], "lr": 0.25}, {"params": weights[1:], "lr": rate}])
    with pytest.raises(KeyError), conditions.weights_held(optimizer):
        assert [g["lr"] for g in optimizer.param_groups] == [0.0, rate]
        raise KeyError
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, rate]
    with conditions.weights_held(None):
        pass
