"""Units whose forward changes tensors in ways that no version shows: reductions, other memory, running statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from autockpt.errors import ConflictError, RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import from_label
from tests.policies.zoo import assert_equal
from tests.runtime.processes import in_two_processes, needs_gloo

KINDS = ("recompute", "selective", "remake", "offload", "segment", "recompute_offload")
D = 64


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(x)
        h.data.mul_(0.5)
        return self.b(torch.tanh(self.a(x + h.sin())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_is_written_to_needs_no_check(kind: str) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Unit(), nn.Linear(D, D))
        seen: dict[str, Tensor] = {}
        with attach(model, choices, sentinels="off"):
            for step in range(5):
                model(torch.randn(32, D)).pow(2).mean().backward()
                seen |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return seen

    assert_equal(trained({"1": from_label(kind)}), trained({}))


class Shared(nn.Module):
    """Reduces a statistic, a product and what it returns over all processes, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        product = self.a(torch.tanh(x - mean / 2) * mean.exp())
        with torch.no_grad():
            dist.all_reduce(product)
        out = x + self.b(product.sin())
        return AllReduced.apply(out)


class AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


def trained_together(rank: int) -> list[str]:
    def gradients(choice: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Shared() for _ in range(3)))
        with attach(model, {} if choice is None else dict.fromkeys("012", choice), sentinels="off"):
            for step in range(3):
                torch.manual_seed(2 * step + rank)
                model(torch.randn(8, D)).pow(2).mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted, wrong = gradients(None), []
    for kind in (*KINDS, '{"kind": "segment", "size": 3}', '{"kind": "remake", "keep": ["**"]}'):
        try:
            got = gradients(from_label(kind))
        except ConflictError as error:
            if "remake" not in kind or "custom autograd function" not in error.message:
                raise
        else:
            wrong += [f"{kind} {name}" for name in wanted if not torch.equal(got[name], wanted[name])]
    return wrong


@needs_gloo
@pytest.mark.slow
def test_what_is_reduced_over_processes_in_place(tmp_path: Path) -> None:
    assert in_two_processes(trained_together, tmp_path) == []


class Kept(nn.Module):
    """The product is kept by ``selective``, so that the bias is not read again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("kind", ["selective", "recompute"])
def test_a_weight_written_before_backward_counts_where_reread(kind: str) -> None:
    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Kept(), nn.Linear(D, D))
        with attach(model, choices):
            loss = model(torch.randn(32, D)).sum()
            model[1].a.bias.data = model[1].a.bias.data + 1  # type: ignore[union-attr]
            loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    choices = {"1": from_label(kind)}
    if kind == "selective":
        assert_equal(gradients(choices), gradients({}))
    else:
        with pytest.raises(RerunMismatch):
            gradients(choices)


@pytest.mark.parametrize("sentinels", ["sample", "off"])
@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("kind", ["offload", "remake", '{"kind": "remake", "keep": ["**"]}'])
def test_reassigned_weights_are_read_where_autograd_would(kind: str, late: int, sentinels: Any) -> None:
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

    assert_equal(gradients({"0": from_label(kind), "1": from_label(kind)}), gradients({}))


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


@pytest.mark.parametrize("kind", KINDS)
def test_torchscript_functions_may_hold_a_units_last_tensor(kind: str) -> None:
    def train(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Scripted(), Scripted())
        with attach(model, dict.fromkeys(("0", "1"), from_label(kind)), sentinels="sample"):
            for _ in range(4):
                model(torch.randn(4, D)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    train("save")  # it is compiled anew in its first calls
    for found, wanted in zip(train(kind), train("save"), strict=True):
        assert torch.equal(found, wanted)


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
@pytest.mark.parametrize("unit", (Observed, Normed))
def test_statistics_that_nothing_tells_of_begin_late(unit: type[nn.Module], kind: str) -> None:
    def train(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(unit(), unit())
        with attach(model, dict.fromkeys(("0", "1"), from_label(kind)), sentinels="sample"):
            for step in range(9):
                if step == 4:
                    for each in model:
                        each.observer.enable_observer() if unit is Observed else each.started.fill_(1.0)
                if step == 7 and unit is Observed:
                    for each in model:
                        each.observer.disable_observer()
                        each.observer.enable_fake_quant()
                model(torch.randn(4, D) * (1 + step)).square().mean().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    for found, wanted in zip(train(kind), train("save"), strict=True):
        assert torch.equal(found, wanted)
