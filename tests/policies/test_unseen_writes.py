"""Units whose forward changes tensors in ways that no version shows: reductions, other memory, running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice
from tests.policies.zoo import assert_equal

KINDS = ("recompute", "selective", "remake", "offload", "segment", "recompute_offload")
D = 64


@pytest.mark.parametrize("sentinels", ["sample", "off"])
@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("kind", ["offload", "remake", {"kind": "remake", "keep": ["**"]}])
def test_reassigned_weights_are_read_where_autograd_would(kind: Any, late: int, sentinels: Any) -> None:
    def block() -> nn.Module:
        frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        read_from_views = nn.Linear(16, 16)
        return nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.SiLU(), frozen, read_from_views, nn.PReLU(4)
        )

    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(block(), block(), nn.Conv2d(4, 4, 1)), {}
        with attach(model, choices, sentinels=sentinels):
            for step in range(late + 3):
                model.zero_grad()
                loss = model(torch.randn(8, 4, 16, 16)).square().mean()
                if step >= late:
                    for tensor in (*model.parameters(), *model.buffers()):
                        tensor.data = tensor.data * 2
                loss.backward()
                found |= {f"{step} {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found

    assert_equal(gradients({"0": parse_choice(kind), "1": parse_choice(kind)}), gradients({}))


class Scripted(nn.Module):
    """As Megatron's blocks, which end in a function of TorchScript: what that saves is the unit's last."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.down(torch.tanh(self.up(x))), self.bias, x)


@torch.jit.script
def gated(x: Tensor, bias: Tensor, rest: Tensor) -> Tensor:
    return rest * torch.sigmoid(x + bias)


class Observed(nn.Module):
    """Observes its values for quantisation, from when on a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.observer = nn.Linear(D, D), FusedMovingAvgObsFakeQuantize()
        self.observer.disable_observer()
        self.observer.disable_fake_quant()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.observer(self.inner(x)))


class Normed(nn.Module):
    """Running statistics without a count of them, of which nothing tells."""

    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.norm.num_batches_tracked = None
        self.register_buffer("started", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(bool(self.started))
        return torch.tanh(self.norm(self.inner(x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", (Scripted, Observed, Normed))
def test_what_nothing_tells_of(unit: type[nn.Module], kind: str) -> None:
    """Statistics begin late; a function of TorchScript holds the unit's last tensor."""

    def train(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(unit(), unit())
        with attach(model, dict.fromkeys(("0", "1"), parse_choice(kind)), sentinels="sample"):
            for step in range(9):
                for each in model:
                    if unit is Observed and step in (4, 7):
                        each.observer.enable_observer(step == 4)
                        each.observer.enable_fake_quant(step == 7)
                    elif unit is Normed and step == 4:
                        each.started.fill_(1.0)
                model(torch.randn(4, D) * (1 + step)).square().mean().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    train("save")  # TorchScript compiles anew in its first calls
    for found, wanted in zip(train(kind), train("save"), strict=True):
        assert torch.equal(found, wanted)
