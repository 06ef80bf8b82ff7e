"""What forward changes in place, where a compiler makes forward and backward of one graph and parts it again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config

from tests.policies.zoo import Row, assert_as_plain, on, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


class Layer(nn.Module):
    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(16) if kind == "batch norm" else nn.Identity()
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "buffer":
                self.mean.mul_(0.5).add_(x.detach().mean(0))
            case "view of a buffer":
                self.mean.view(4, 4)[0].add_(x.detach().mean())
            case "data of a buffer":
                self.mean.data = self.mean.data * 0.5 + x.detach().mean(0)
            case "input":
                x.mul_(1.5)
            case "weight":
                self.down.weight.data.mul_(0.9)
        return x + self.norm(self.down(torch.tanh(self.up(x * self.mean))))


class Scaled(nn.Module):
    """What is given to the layers is no leaf, so that they may write to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


KINDS = ["buffer", "view of a buffer", "data of a buffer", "input", "weight", "batch norm"]


UNITS = ("1.units.0", "1.units.1")


def model(kind: str, backend: str) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(nn.Sequential(Scaled(), Row(lambda: Layer(kind))), fullgraph=True, backend=backend)  # type: ignore[return-value]


def rows() -> Tensor:
    return torch.randn(8, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_reads_what_forward_read(kind: str):
    assert_as_plain(partial(model, kind, "aot_eager"), on(UNITS, "recompute"), rows, 2)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"data of a buffer"}))  # which that compiler cannot take
def test_so_does_a_compile_budget_whose_settings_are_for_one_compilation(kind: str):
    before = config.joint_custom_pass, config.activation_memory_budget
    make = partial(model, kind, "aot_eager_decomp_partition")
    got = trained(make, on(UNITS, "compile_budget"), rows, 2)
    assert (config.joint_custom_pass, config.activation_memory_budget) == before
    torch.testing.assert_close(got, trained(make, {}, rows, 2))
