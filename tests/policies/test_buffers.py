"""Buffers that a forward changes, under every policy that runs it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE
from tests.policies.zoo import assert_equal


class Counting(nn.Module):
    """Scales by how often it was called before: a buffer that it makes itself, changed in ways that autograd does not
    see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.ones(()))
        out = torch.sigmoid(self.linear(x) + self.count)
        self.count.data.add_(0.25)
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


MAKERS: dict[str, Any] = {
    "a count": Counting,
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
