"""Units whose forward changes tensors in ways that no version shows: buffers, reductions, running statistics."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from tests.policies.zoo import Unit, assert_as_plain, on, trained

KINDS = ("recompute", "selective", "remake", "offload", "segment", "recompute_offload")
D = 64


def counting(unit: Any, x: Tensor) -> Tensor:
    """Scales by how often it was called before: a buffer that it makes itself, changed in ways that autograd does not
    see."""
    if not hasattr(unit, "count"):
        unit.register_buffer("count", torch.ones(()))
    out = torch.sigmoid(unit.linear(x) + unit.count)
    unit.count.data.add_(0.25)
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
    "a count": lambda: Unit(counting),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sigmoid()),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    "batch norm by hand": HandMadeNorm,
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Sigmoid()),
    "instance norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.InstanceNorm1d(4, track_running_stats=True)),
}


def stack(name: str) -> nn.Module:
    return nn.Sequential(*(MAKERS[name]() for _ in range(2)))


def rows() -> Tensor:
    return torch.randn(4, 8)


def evaluated(model: Any, step: int) -> None:
    model.eval()
    model(rows()).sum().backward()
    model.train()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recompute", "offload"])
@pytest.mark.parametrize("name", MAKERS)
def test_each_step_changes_buffers_once(name, kind):
    assert_as_plain(partial(stack, name), on("01", kind), rows, 3, before=evaluated)
    if "spectral" not in name:
        assert_as_plain(partial(stack, name), on("01", kind), rows, 3, together=True)


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

    def reassign(model: Any, step: int) -> None:
        for tensor in (*model.parameters(), *model.buffers()) if step >= late else ():
            tensor.data = tensor.data * 2

    make, batch = lambda: nn.Sequential(block(), block(), nn.Conv2d(4, 4, 1)), lambda: torch.randn(8, 4, 16, 16)
    assert_as_plain(make, on("01", kind), batch, late + 3, between=reassign, sentinels=sentinels)


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


def begin(model: Any, step: int) -> None:
    """Statistics begin late."""
    for each in model:
        if isinstance(each, Observed) and step in (4, 7):
            each.observer.enable_observer(step == 4)
            each.observer.enable_fake_quant(step == 7)
        elif isinstance(each, Normed) and step == 4:
            each.started.fill_(1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", (Scripted, Observed, Normed))
def test_what_nothing_tells_of(unit: type[nn.Module], kind: str) -> None:
    how: Any = (lambda: nn.Sequential(unit(), unit()), on("01", kind), lambda: torch.randn(4, D), 9)
    trained(how[0], {}, *how[2:])  # TorchScript compiles again in its first calls
    assert_as_plain(*how, before=begin)
