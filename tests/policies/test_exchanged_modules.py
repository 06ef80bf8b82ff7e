"""Modules that are exchanged, added or taken away while a unit is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import InPlaceError
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, Choice, KeepAttention, Remake, Selective
from tests.errors import raises
from tests.policies.zoo import assert_equal

CHOICES: list[Choice] = [RECOMPUTE, KeepAttention(), Selective(), Remake()]


class Memory(nn.Module):
    """A layer whose forward changes a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.linear(x) * (1 + self.calls / 4) + self.mean
        self.mean.add_(x.detach().mean(0))
        return out.sigmoid()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(self.linear(x)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "exchange": lambda block: setattr(block, "inner", Memory()),
    "exchange deep": lambda block: block.inner.__setitem__(0, Memory()),
    "add": lambda block: block.inner.append(Memory()),
    "take away": lambda block: block.inner.__delitem__(1),
}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def run(model: nn.Module, change: Callable[[Any], Any], at: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    seen: dict[str, Tensor] = {}
    for step in range(7):
        if step == at:
            for block in model.children():
                change(block)
        model.zero_grad()
        model(torch.randn(4, 8)).pow(2).sum().backward()
        seen |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        seen |= {f"{step} {n}": b.clone() for n, b in model.named_buffers()}
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 4])
@each_change
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_comes_later_is_got_to_know_from_the_beginning(choice, change, at):
    wanted, model = run(make(), change, at), make()
    with attach(model, {"0": choice, "1": choice}):
        assert_equal(run(model, change, at), wanted)


@each_change
@pytest.mark.parametrize("choice", [c for c in CHOICES if c.kind != "remake"], ids=str)
def test_between_forward_and_backward_is_an_error(choice, change):
    model = make()
    with attach(model, {"0": choice, "1": choice}):
        model(torch.randn(4, 8)).sum().backward()
        loss = model(torch.randn(4, 8)).sum()
        change(model[1])
        with raises(InPlaceError):
            loss.backward()
