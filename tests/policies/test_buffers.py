"""Buffers that a forward changes, under every policy that runs it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE
from tests.errors import raises
from tests.policies.zoo import assert_equal


def _registered(unit: nn.Module) -> None:
    if not hasattr(unit, "count"):
        unit.register_buffer("count", torch.ones(()))


def _replaced(unit: Any) -> None:
    unit.count = unit.count + 0.25


# before and after the buffer is read; "late": from the third call in training on
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "in place": (lambda unit: None, lambda unit: unit.count.add_(0.25)),
    "at the beginning": (lambda unit: unit.count.add_(0.25), lambda unit: None),
    "behind autograd's back": (lambda unit: None, lambda unit: unit.count.data.add_(0.25)),
    "in training": (lambda unit: None, lambda unit: unit.training and unit.count.mul_(1.5)),
    "replaced": (lambda unit: None, _replaced),
    "registered": (_registered, _replaced),
    "late": (lambda unit: None, _replaced),
}


class Counting(nn.Module):
    """Scales by how often it was called before; ``how`` says in which way it keeps count."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after = CHANGES[how]
        self.linear, self.calls, self.begins = nn.Linear(8, 8), 0, 3 if how == "late" else 0
        self.register_buffer("constant", torch.full((), 0.5))
        if "registered" not in how:
            _registered(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls < self.begins:
            return self.linear(x)
        self.before(self)
        out = torch.sigmoid(self.linear(x) * self.constant + self.count)
        self.after(self)
        return out


class HandMadeNorm(nn.Module):
    """Statistics that no norm layer owns, changed by a kernel that does not tell autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=self.training).sigmoid()


MAKERS: dict[str, Any] = {how: partial(Counting, how) for how in CHANGES if how != "late"} | {
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sigmoid()),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    "batch norm by hand": HandMadeNorm,
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "instance norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.InstanceNorm1d(4, track_running_stats=True)),
}


def make(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MAKERS[name]() for _ in range(2)))


def run(model: nn.Module, *, together: bool = False) -> dict[str, Tensor]:
    """Three steps, evaluation between them; or three forwards before their backwards."""
    torch.manual_seed(1)
    seen: dict[str, Tensor] = {}
    losses = []
    for i in range(3):
        losses.append(model(torch.randn(4, 8)).pow(2).sum())
        if not together:
            losses.pop().backward()
            model.eval()
            model(torch.randn(4, 8)).sum().backward()
            model.train()
        seen |= {f"{i} buffer {n}": b.clone() for n, b in model.named_buffers()}
        if not together:
            seen |= {f"{i} {n}": p.grad.clone() for n, p in model.named_parameters()}
    for loss in losses:
        loss.backward()
    seen |= {n: p.grad.clone() for n, p in model.named_parameters()}
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("choice", [RECOMPUTE, OFFLOAD], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_each_step_changes_them_once(name, choice):
    wanted, model = run(make(name)), make(name)
    with attach(model, {"0": choice, "1": choice}):
        assert_equal(run(model), wanted)


@pytest.mark.parametrize("name", [n for n in MAKERS if "spectral" not in n])
def test_forwards_before_their_backwards(name):
    wanted, model = run(make(name), together=True), make(name)
    with attach(model, {"0": RECOMPUTE, "1": RECOMPUTE}):
        assert_equal(run(model, together=True), wanted)


def test_one_that_begins_to_change_late_is_refused():
    model = nn.Sequential(Counting("late"))
    with attach(model, {"0": RECOMPUTE}), raises(RerunMismatch, "0"):
        run(model)
