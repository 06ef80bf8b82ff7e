"""What forward changes in place, where a compiler makes forward and backward of one graph and parts it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice

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


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


KINDS = ["buffer", "view of a buffer", "data of a buffer", "input", "weight", "batch norm"]


def train(kind: str, choice: str | None, **compiler: Any) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Model(kind), torch.randn(8, 16)
    compiled: Any = torch.compile(model, fullgraph=True, **compiler)
    with attach(model, {} if choice is None else {f"layers.{i}": parse_choice(choice) for i in range(2)}):
        for _ in range(2):
            compiled(batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + list(model.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_reads_what_forward_read(kind: str):
    wanted, got = (train(kind, choice, backend="aot_eager") for choice in (None, "recompute"))
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"data of a buffer"}))  # which that compiler cannot take
def test_so_does_a_compile_budget(kind: str):
    wanted, got = (train(kind, choice, backend="aot_eager_decomp_partition") for choice in (None, "compile_budget"))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_the_compilers_settings_hold_for_one_compilation():
    from torch._functorch import config

    before = config.joint_custom_pass, config.activation_memory_budget
    train("buffer", "compile_budget", backend="aot_eager_decomp_partition")
    assert (config.joint_custom_pass, config.activation_memory_budget) == before
