"""What only several units that run again together can get wrong."""

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, Segment
from tests.policies.zoo import Unit, assert_as_plain, bytes_alive_after

pytestmark = pytest.mark.slow

WAYS = [Segment(size=2), Segment(size=99)]
each_way = pytest.mark.parametrize("way", WAYS, ids=str)


def sigmoid(unit: nn.Module, x: Tensor) -> Tensor:
    return torch.dropout(unit.linear(x).sigmoid(), 0.2, True)


def in_a_row(units: Any, x: Tensor, between: Callable[[Tensor], Any] = lambda x: x) -> Tensor:
    for unit in units:
        x = unit(x)
        between(x)
    return x


class Stack(nn.Module):
    """Four units and what the parent does with them."""

    def __init__(self, parent: Callable[..., Tensor] = in_a_row, body: Callable[..., Any] = sigmoid) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Unit(body, 64) for _ in range(4))
        self.parent = parent

    def forward(self, x: Tensor) -> Tensor:
        return self.parent(self.units, x)

    @property
    def calls(self) -> list[Any]:
        return [unit.calls for unit in self.units]


def choices(way: Choice) -> dict[str, Choice]:
    return {f"units.{i}": way for i in range(4)}


def rows() -> Tensor:
    return torch.randn(256, 64)


# --- gradients


UNSEEN: dict[str, Callable[..., Tensor]] = {
    "written to by data": lambda units, x: in_a_row(units, x, lambda x: x.data.clamp_(0.3, 0.6)),
    "written to by NumPy": lambda units, x: in_a_row(units, x, lambda x: x.detach().numpy().__imul__(0.5)),
}
PARENTS: dict[str, Callable[..., Tensor]] = UNSEEN | {
    "residual": lambda units, x: functools.reduce(lambda x, unit: x + unit(x), units, x),
    "in place": lambda units, x: in_a_row(units, x, lambda x: x.mul_(1.5)),
    "detached": lambda units, x: (y := units[1](units[0](x)), units[3](units[2](y.detach()) + y))[-1],
    "long ways": lambda units, x: (a := units[0](x), b := units[1](a), units[3](units[2](b) + a) + b)[-1],
    "skipped": lambda units, x: units[2](units[0](x)),
    "unused": lambda units, x: (units[1](units[0](x)), units[3](units[2](x)))[-1],
}


@each_way
@pytest.mark.parametrize("name", PARENTS)
def test_whatever_the_parent_does_between_units(name: str, way: Segment):
    with pytest.raises(RerunMismatch) if name in UNSEEN else nullcontext():
        assert_as_plain(lambda: Stack(PARENTS[name]), choices(way), rows, 2)


@each_way
def test_tuples_masks_and_states_from_outside(way: Segment):
    """As encoder-decoder models have them: all units read the same tables, and each hands on more than one tensor."""

    def body(unit, x, states, *, tables, bias=None):
        scale, index = tables
        y = torch.dropout(unit.linear(x).sigmoid() * scale + states, 0.2, True)[index]
        return y, {"bias": y.mean(0) if bias is None else bias}, None

    def parent(units, x):
        states, tables, bias = x.sin(), (torch.linspace(0, 1, 64), torch.arange(255, -1, -1)), None
        for unit in units:
            x, more, _ = unit(x, states, tables=tables, bias=bias)
            bias = more["bias"]
        return x + bias

    assert_as_plain(lambda: Stack(parent, body), choices(way), rows, 2)


# --- what runs again


def test_a_pass_that_broke_off_leaves_nothing_behind():
    """After it comes a pass that begins in the middle, without the root's forward."""
    model = Stack()
    with attach(model, choices(Segment(size=4))):
        handle = model.units[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(4, 64))
        handle.remove()
        x = torch.randn(256, 64)
        before = model.calls
        model.units[2](model.units[1](x)).sum().backward()
        assert [n - m for n, m in zip(model.calls, before, strict=True)] == [0, 2, 2, 0]


# --- what is kept


@pytest.mark.parametrize(("size", "boundaries"), [(1, 3), (2, 1), (3, 1), (4, 0)])
def test_nothing_but_the_input_of_each_region_is_kept(size: int, boundaries: int):
    """... and the output, which is the caller's, and of four calls a random state."""
    model, x = Stack(), rows()
    with attach(model, choices(Segment(size=size))):
        for _ in range(2):
            model(x)
        kept = bytes_alive_after(lambda: model(x))
    assert kept == (boundaries + 1) * x.nbytes + 4 * torch.get_rng_state().nbytes


@each_way
@pytest.mark.parametrize("parent", [in_a_row, *PARENTS.values()], ids=["in a row", *PARENTS])
def test_a_forward_without_backward_is_freed_at_once(parent: Callable[..., Tensor], way: Segment):
    model = Stack(parent)
    with attach(model, choices(way)):
        gc.collect()
        gc.disable()
        try:
            outputs: list[weakref.ref[Any]] = []
            for unit in model.units:
                unit.register_forward_hook(lambda m, a, out: outputs.append(weakref.ref(out.untyped_storage())))
            out = model(torch.randn(8, 64).requires_grad_())
            del out
            model(torch.randn(8, 64))  # a region that was not called to its end waits for the next pass
            assert sum(ref() is not None for ref in outputs[: len(outputs) // 2]) == 0
        finally:
            gc.enable()
