"""Buffers that a forward changes, under every policy that runs it again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE
from tests.policies.zoo import assert_equal


class Counting(nn.Module):
    """Scales by how often it was called before; ``how`` says in which way it keeps count."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)
        if "registered" not in how:
            self.register_buffer("count", torch.ones(()) if "filled" not in how else None)
        self.register_buffer("constant", torch.full((), 0.5))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "registered late" and not hasattr(self, "count"):
            self.register_buffer("count", torch.ones(()))
        if self.how == "filled late" and self.count is None:
            self.count = torch.ones(())
        if self.how.endswith("in the third call"):
            self.calls += self.training
            if self.calls < 3:
                return self.linear(x)
            if "filled" in self.how and self.count is None:
                self.count = torch.ones(())
            if "registered" in self.how and not hasattr(self, "count"):
                self.register_buffer("count", torch.ones(()))
        if self.how == "at the beginning":
            self.count.add_(0.25)
        out = torch.sigmoid(self.linear(x) * self.constant + self.count)
        if self.how == "in place":
            self.count.add_(0.25)
        elif self.how == "behind autograd's back":
            self.count.data.add_(0.25)
        elif self.how == "replaced" or "registered" in self.how or "filled" in self.how:
            self.count = self.count + 0.25
        elif self.how == "in training" and self.training:
            self.count.mul_(1.5)
        return out


MAKERS = {
    how: lambda how=how: Counting(how)
    for how in (
        *("in place", "at the beginning", "behind autograd's back", "replaced", "in training"),
        *("registered late", "filled late", "registered in the third call", "filled in the third call"),
    )
} | {
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sigmoid()),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    "batch norm by hand": lambda: HandMadeNorm(),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "instance norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.InstanceNorm1d(4, track_running_stats=True)),
}


class HandMadeNorm(nn.Module):
    """Statistics that no norm layer owns, changed by a kernel that does not tell autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=self.training).sigmoid()


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
