"""Modules that are exchanged, added or taken away while a unit is planned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from autockpt.errors import InPlaceError
from autockpt.schema.choices import RECOMPUTE, Choice, KeepAttention, Remake, Selective
from tests.errors import raises
from tests.policies.zoo import assert_as_plain, on, trained

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
        self.linear = nn.Linear(8, 8, bias=False)
        self.inner: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(self.linear(x)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "exchange": lambda block: setattr(block, "inner", Memory()),
    "exchange deep": lambda block: block.inner.__setitem__(0, Memory()),
    "add": lambda block: block.inner.append(Memory()),
    "take away": lambda block: block.inner.__delitem__(1),
    "a bias in the place of None": lambda block: setattr(block.linear, "bias", nn.Parameter(torch.ones(8))),
    "prune what is frozen": lambda block: prune.l1_unstructured(block.inner[0].requires_grad_(False), "weight", 0.5),
}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def make() -> nn.Module:
    return nn.Sequential(Block(), Block())


def rows() -> Tensor:
    return torch.randn(8, 8)  # as many elements as a weight


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 4])
@each_change
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_comes_later_is_got_to_know_from_the_beginning(choice, change, at):
    def exchange(model: Any, step: int) -> None:
        for block in model.children() if step == at else ():
            change(block)

    assert_as_plain(make, on("01", choice), rows, 7, before=exchange)


@each_change
@pytest.mark.parametrize("choice", [c for c in CHOICES if c.kind != "remake"], ids=str)
def test_between_forward_and_backward_is_an_error(choice, change):
    with raises(InPlaceError):
        trained(make, on("01", choice), rows, 2, between=lambda model, step: change(model[1]) if step else None)
