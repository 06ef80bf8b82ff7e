"""What is written down about each op, on real tensors: storages, phases, modules, in-place additions, saved tensors."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autockpt.schema.graph import TensorMeta, Unit
from autockpt.tracing.location import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from autockpt.tracing.recorder import OpRecord, RealRecorder
from autockpt.tracing.traced_run import called_units
from tests.tracing.reference import op_counts


def recorder(model: nn.Module | None = None) -> RealRecorder:
    made = RealRecorder(torch.device("cpu"))
    if model is not None:
        made.location.bind(model)
        made.log.adopt(model.parameters())
    return made


def names(ops: list[OpRecord]) -> list[str]:
    return [op.call.operator.base for op in ops]


def test_births_deaths_and_inputs() -> None:
    made = recorder()
    with made.recording():
        a = torch.ones(8)
        b = a[2:].mul(2)
        del a
        c = b + b
        del b, c
    assert names(made.ops) == ["ones", "slice", "mul", "add"]
    assert made.log.birth == [0, 2, 3]
    assert made.log.death == [2, 3, 3]
    assert made.ops[2].inputs == (0,)
    assert made.ops[3].inputs == (1, 1)
    assert made.ops[1].outputs == (TensorMeta(shape=(6,), stride=(1,), dtype="float32", storage=0),)


def test_nothing_is_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    made = recorder(model)
    gc.disable()
    try:
        with made.recording():
            hidden = model(torch.ones(2, 8))
            alive = weakref.ref(hidden.untyped_storage())
            hidden.sum().backward()
            del hidden
            assert alive() is None
        with pytest.raises(RuntimeError), made.recording():
            lost = torch.ones(3)
            gone = weakref.ref(lost)
            torch.mm(lost, lost)
        del lost
        assert gone() is None
    finally:
        gc.enable()


def test_phases_and_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=False)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = recorder(model)
    with made.recording():
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        made.location.mark("optimizer")
        optimizer.step()
    paths = made.location.paths
    seen = {(op.phase, paths[op.module]) for op in made.ops if op.call.operator.base in ("addmm", "mm", "relu", "pow")}
    assert seen >= {(FORWARD, "a"), (FORWARD, "b.0"), (FORWARD, ""), (BACKWARD, "a"), (BACKWARD, "b.2")}
    assert {path for phase, path in seen if phase == RECOMPUTE} == {"b.0"}  # it stops where all is there again
    assert {op.phase for op in made.ops if op.call.operator.base == "add_" and not op.call.flops} >= {OPTIMIZER}
    weights = [op for op in made.ops if op.phase == BACKWARD and op.call.operator.base == "mm"]
    assert {paths[op.module] for op in weights} == {"a", "b.0", "b.2"}


def branches(x: Tensor) -> Tensor:
    return x.sin() + x.cos() + x.exp()


def mixed_views(x: Tensor) -> Tensor:
    return x.view(4, 4).t().reshape(-1).sin() + x.view(2, 8).sum() + x.cos()


class AddsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        fresh = grads[0] * 2
        return fresh + grads[0] * 3


def product_and_bias(x: Tensor) -> Tensor:
    square = x.view(4, 4)
    by_operator = torch.nn.functional.linear(square.expand(2, 4, 4), square.expand(4, 4), square[0].clone())
    by_hand = torch.bmm(square.unsqueeze(0), square.unsqueeze(0)) + square
    return by_operator.sum() + by_hand.sum()


def masked_attention(x: Tensor) -> Tensor:
    q = x.view(1, 1, 4, 4)
    mask = torch.zeros(4, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5).sum()


@pytest.mark.parametrize(
    "function",
    [
        branches,
        mixed_views,
        AddsInBackward.apply,
        product_and_bias,
        masked_attention,
        torch.var_mean,
    ],
)
def test_additions_are_in_place_where_a_plain_step_has_them_so(function: Any) -> None:
    def step() -> None:
        result = function(leaf * 1.0)
        (result if isinstance(result, Tensor) else result[0] + result[1]).sum().backward()

    leaf = torch.rand(16, requires_grad=True)
    step()
    real = op_counts(step)
    made = recorder()
    with made.recording():
        step()
    found = names(made.ops)
    assert (found.count("add_"), found.count("add")) == (real["add_"], real["add"])


def test_a_gradient_that_someone_holds_is_not_overwritten() -> None:
    held: list[Tensor] = []
    leaf = torch.rand(16, requires_grad=True)
    made = recorder()
    with made.recording():
        hidden = leaf * 1.0
        first = hidden.sin()
        first.register_hook(lambda gradient: held.append(gradient))
        (first.view(16) + hidden.cos()).sum().backward()
    expected = leaf.detach().cos() - leaf.detach().sin()
    assert leaf.grad is not None and torch.allclose(leaf.grad, expected)


class Reordered(nn.Module):
    """Blocks called in another order than they stand in, one with another input, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[2](self.blocks[0](x))
        return self.blocks[1](torch.cat([x, x]))


def test_order_of_first_call_and_kinds_by_behaviour() -> None:
    model = Reordered()
    found = [Unit(name=f"blocks.{i}", cls="Sequential", kind=0) for i in range(4)]
    found += [Unit(name=f"blocks.{i}.0", cls="Linear", kind=1, role="mlp", parent=f"blocks.{i}") for i in range(4)]
    made = recorder(model)
    with made.recording():
        model(torch.ones(2, 4, requires_grad=True) * 1.0).sum().backward()
    units = called_units(found, made)
    assert [u.name for u in units] == [*(f"blocks.{i}" for i in (0, 2, 1)), *(f"blocks.{i}.0" for i in (0, 2, 1))]
    assert [u.kind for u in units] == [0, 0, 1, 2, 2, 3]
    assert units[3].parent == "blocks.0"
