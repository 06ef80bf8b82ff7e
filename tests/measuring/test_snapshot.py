"""After measuring, every object is the one it was and holds the very bits it held."""

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.devices import get_device
from autockpt.errors import MeasurementError, UsageError
from autockpt.measuring import StepRunner
from autockpt.measuring.snapshot import Snapshot
from autockpt.workload import Step
from tests.errors import raises
from tests.measuring.small_workloads import RECOMPUTE_ALL, Stack, bits, make_workload, same, train


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "none"])
@pytest.mark.parametrize("trained", [False, True])
def test_all_state_comes_back_bit_equal_in_the_same_objects(optimizer, trained):
    model = Stack(norm=True)
    settings: dict[str, Any] = {"optimizer": None}
    if optimizer == "adamw":
        settings = {"scaler": torch.amp.GradScaler("cpu"), "max_grad_norm": 1.0, "accumulate": 2}
    elif optimizer == "sgd":
        settings["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    workload = make_workload(model, **settings)
    if trained:
        train(workload)
    model.layers[0].eval()
    next(model.parameters()).requires_grad_(False)
    before = bits(workload)
    snapshot = Snapshot(workload)
    assert all(p.grad is None for p in model.parameters())
    StepRunner(workload, get_device("cpu")).measure(RECOMPUTE_ALL, steps=1)
    train(workload)
    model.train()
    snapshot.restore()
    after = bits(workload)
    for name in before:
        assert same(before[name], after[name]), name
    snapshot.restore()
    assert same(before["tensors"], bits(workload)["tensors"])


def test_gradients_that_share_one_buffer_come_back():
    model = nn.Linear(4, 3)
    flat = torch.arange(15.0)
    model.weight.grad, model.bias.grad = flat[:12].view(3, 4), flat[12:]
    workload = Step(model, torch.ones(2, 4), loss=lambda m, x: m(x).sum())
    snapshot = Snapshot(workload)
    workload.forward_backward()
    snapshot.restore()
    assert model.weight.grad is not None
    assert model.weight.grad.untyped_storage()._cdata == flat.untyped_storage()._cdata
    assert torch.equal(flat, torch.arange(15.0))


def test_replaced_tensors_and_new_attributes_are_undone():
    """Exponential averages and caches that modules and optimizers swap for new tensors."""
    model, original = Stack(), torch.ones(3)
    model.register_buffer("average", original)
    workload = make_workload(model)
    snapshot = Snapshot(workload)
    model.average = original * 0.9
    model.cache = torch.zeros(5)
    original.add_(1)
    snapshot.restore()
    assert model.average is original
    assert torch.equal(original, torch.ones(3))
    assert not hasattr(model, "cache")


class Average:
    """Keeps an average of the weights, partly in place and partly not."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.steps = 0

    def update(self, model: nn.Module) -> None:
        self.steps += 1
        for number, (name, p) in enumerate(model.named_parameters()):
            if number % 2:
                self.values[name].lerp_(p.detach(), 0.5)
            else:
                self.values[name] = self.values[name].lerp(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.steps = dict(state["values"]), state["steps"]


def test_what_modules_keep_in_containers_comes_back():
    class Bank(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.bank, self.seen, self.counts = deque([torch.ones(1, 4)], maxlen=2), {0}, {"calls": [0]}

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            out = super().forward(input) + torch.cat(list(self.bank)).sum()
            self.bank.append(out.detach()[:1])
            self.seen.add(len(self.counts["calls"]))
            self.counts["calls"].append(1)
            return out

    inner = Bank()
    model = nn.Sequential(nn.Linear(4, 4), inner)
    bank, first = inner.bank, inner.bank[0]
    snapshot = Snapshot(Step(model, torch.ones(2, 4), loss=lambda model, batch: model(batch).sum()))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    snapshot.restore()
    assert inner.bank is bank and len(bank) == 1 and bank[0] is first and bool((first == 1).all())
    assert inner.seen == {0} and inner.counts == {"calls": [0]}


def test_objects_named_for_a_full_step_come_back():
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    average, counter, batch = Average(model), torch.zeros(2), torch.randn(8, 16)

    def full_step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        schedule.step()
        average.update(model)
        counter.add_(1)

    workload = Step(model, batch, full_step=full_step, snapshot=(optimizer, schedule, average, counter))
    full_step()
    expected = copy.deepcopy((schedule.state_dict(), average.state_dict(), counter, optimizer.param_groups[0]["lr"]))
    snapshot = Snapshot(workload)
    StepRunner(workload, get_device("cpu")).measure({}, steps=2)
    assert counter[0] > 1
    snapshot.restore()
    found = schedule.state_dict(), average.state_dict(), counter, optimizer.param_groups[0]["lr"]
    assert same(expected, found)


def test_an_object_without_state_changes_nothing():
    workload = make_workload()
    train(workload)
    before = bits(workload)
    workload.snapshot = (object(),)
    with raises(UsageError):
        Snapshot(workload)
    assert same(before, bits(workload))


@pytest.mark.parametrize("copies", [0, 30, 70])  # among weights, optimizer states, gradients
def test_too_little_host_memory_changes_nothing(monkeypatch, copies):
    workload = make_workload()
    train(workload)
    before = bits(workload)
    calls: list[int] = []

    def full(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        calls.append(1)
        if len(calls) > copies:
            raise MemoryError
        return storage.clone()

    monkeypatch.setattr("autockpt.measuring.snapshot._host_copy", full)
    with raises(MeasurementError):
        Snapshot(workload)
    assert same(before, bits(workload))
