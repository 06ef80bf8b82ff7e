"""Calls whose outputs are kept: skipped in the recomputation where they can be, and run again where they cannot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autockpt.checkpointing import CheckpointedUnit
from autockpt.checkpointing.kept_outputs import KeepingFrame, Scope, frame_of
from autockpt.errors import ConflictError
from tests.errors import raises

RAN: list[str] = []  # outside of the unit, where no recomputation restores it


class Kept(nn.Module):
    """A module whose calls are kept."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scope = inner, Scope()

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            RAN.append("kept")
            return self.inner(x)

        frame = frame_of("unit")
        return run(x) if frame is None else frame.call(self.scope, self.inner, run, (x,), {})


class Unit(nn.Module):
    def __init__(self, inner: nn.Module, body: Callable[[Unit, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept, self.down, self.body, self.scope = Kept(inner), nn.Linear(8, 8), body, Scope()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def plain(unit: Unit, x: Tensor) -> Tensor:
    return unit.down(F.gelu(unit.kept(x)))


def trained(inner: Callable[[], nn.Module], body: Any = plain, *, framed: bool, steps: int = 5, **given: Any) -> Any:
    """Gradients of several steps, and how often the kept module ran."""
    torch.manual_seed(0)
    unit, found = Unit(inner(), body), []
    checkpointed = CheckpointedUnit("unit", unit)
    RAN.clear()
    for _ in range(steps):
        x = torch.randn(given.get("size", (4, 8)), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=given.get("autocast", False)):
            entered = x * 1
            out = KeepingFrame(checkpointed, unit, (entered,), {}).run((entered,), {}) if framed else unit(entered)
        out.float().square().sum().backward()
        found += [x.grad, *(p.grad.clone() for p in unit.parameters() if p.grad is not None)]
    return found, len(RAN)


def assert_equal(found: Any, wanted: Any) -> None:
    assert len(found[0]) == len(wanted[0]) and all(map(torch.equal, found[0], wanted[0]))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(4, 8), (2, 3, 8)])
def test_a_linear_layer_is_not_run_again(size: tuple[int, ...], bias: bool, autocast: bool) -> None:
    run = partial(trained, lambda: nn.Linear(8, 8, bias=bias), size=size, autocast=autocast)
    found, wanted = run(framed=True), run(framed=False)
    assert_equal(found, wanted)
    assert found[1] == wanted[1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_convolution_is_not_run_again(frozen: bool, autocast: bool) -> None:
    def made() -> nn.Module:
        return nn.Conv1d(8, 8, 3, padding=1).requires_grad_(not frozen)

    def body(unit: Unit, x: Tensor) -> Tensor:
        return unit.down(F.gelu(unit.kept(x)).mT)

    run = partial(trained, made, body, size=(2, 8, 5), autocast=autocast)
    found, wanted = run(framed=True), run(framed=False)
    assert_equal(found, wanted)
    assert found[1] == wanted[1]


def in_place(unit: Unit, x: Tensor) -> Tensor:
    return unit.down(F.gelu(unit.kept(x).mul_(2.0)))


def by_data(unit: Unit, x: Tensor) -> Tensor:
    hidden = unit.kept(x)
    hidden.data.mul_(2.0)
    return unit.down(F.gelu(hidden))


def inside_a_gradient(unit: Unit, x: Tensor) -> Tensor:
    hidden = unit.kept(x)
    (slope,) = torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
    return unit.down(F.gelu(hidden) * slope.detach())


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5)


def dropped_out(unit: Unit, x: Tensor) -> Tensor:
    return unit.down(F.dropout(F.gelu(unit.kept(x)), 0.5))


class Greedy(nn.Linear):
    """Saves more of its own than it returns."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sin().exp()


class Same(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("inner", "body"),
    [(nn.Linear, in_place), (nn.Linear, by_data), (Noisy, dropped_out), (Greedy, plain), (Same, plain)],
)
def test_what_cannot_be_skipped_runs_again(inner: type[nn.Linear], body: Any) -> None:
    found = trained(lambda: inner(8, 8), body, framed=True)
    wanted = trained(lambda: inner(8, 8), body, framed=False)
    assert_equal(found, wanted)
    assert found[1] == 2 * wanted[1]


def inside_a_gradient_after_attention(unit: Unit, x: Tensor) -> Tensor:
    hidden = attention(unit, x)
    (slope,) = torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
    return attention(unit, x) + hidden.sin() * slope.detach()


@pytest.mark.parametrize(
    ("inner", "body", "size"),
    [(8, inside_a_gradient, (4, 8)), (48, inside_a_gradient_after_attention, (1, 16, 8))],
    ids=["a module", "attention"],
)
def test_a_gradient_taken_inside_has_its_graph(inner: int, body: Any, size: tuple[int, ...]) -> None:
    run = partial(trained, lambda: nn.Linear(8, inner), body, size=size)
    assert_equal(run(framed=True), run(framed=False))


def test_a_gradient_that_is_taken_inside_late_has_its_graph() -> None:
    steps = [0]

    def body(unit: Unit, x: Tensor) -> Tensor:
        hidden = attention(unit, x)
        steps[0] += torch._C._current_graph_task_id() == -1
        if steps[0] > 2:
            torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
        return attention(unit, hidden.mean(1).sin())

    run = partial(trained, lambda: nn.Linear(8, 48), body, size=(1, 16, 8))
    wanted = run(framed=False)
    steps[0] = 0
    assert_equal(run(framed=True), wanted)


def test_another_path_is_an_error() -> None:
    def body(unit: Unit, x: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        frame = frame_of("unit")
        hidden = unit.kept(x)
        assert frame is not None
        return unit.down(frame.call(unit.scope, "second" if again else "first", torch.sin, (hidden,), {}).cos())

    with raises(ConflictError, "unit"):
        trained(lambda: nn.Linear(8, 8), body, framed=True)


def attention(unit: Unit, x: Tensor, dropout: float = 0.0) -> Tensor:
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    frame = frame_of("unit")
    parts = unit.kept(x).view(1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    run = lambda: F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=dropout)  # noqa: E731
    with (None if frame is None else frame.watching(unit.scope)) or nullcontext():
        return unit.down(run().tanh())


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "attention" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_fused_attention_is_not_run_again(autocast: bool) -> None:
    run = partial(trained, lambda: nn.Linear(8, 48), attention, size=(1, 16, 8), autocast=autocast)
    wanted = run(framed=False)
    with Counted() as mode:
        assert_equal(run(framed=True), wanted)
    assert mode.count == 5


def test_attention_with_dropout_runs_again() -> None:
    body = partial(attention, dropout=0.5)
    run = partial(trained, lambda: nn.Linear(8, 48), body, size=(1, 16, 8))
    assert_equal(run(framed=True), run(framed=False))


def test_outputs_are_held_once_and_let_go_of_with_the_graph() -> None:
    seen: list[weakref.ref[Any]] = []

    def body(unit: Unit, x: Tensor) -> Tensor:
        hidden = unit.kept(x)
        seen.append(weakref.ref(hidden.untyped_storage()))
        return unit.down(F.gelu(hidden))

    unit = Unit(nn.Linear(8, 8), body)
    checkpointed = CheckpointedUnit("unit", unit)
    gc.disable()
    try:
        x = torch.randn(4, 8)
        out = KeepingFrame(checkpointed, unit, (x,), {}).run((x,), {})
        assert seen[0]() is not None
        del out
        assert seen[0]() is None
    finally:
        gc.enable()


def test_the_last_output_is_not_held() -> None:
    """No recomputation comes to where it is needed."""
    seen: list[weakref.ref[Any]] = []

    def body(unit: Unit, x: Tensor) -> Tensor:
        hidden = unit.kept(F.gelu(x))
        seen.append(weakref.ref(hidden.untyped_storage()))
        return hidden + 1

    run = partial(trained, lambda: nn.Linear(8, 8), body)
    assert_equal(run(framed=True, steps=2), run(framed=False, steps=2))
    unit, x = Unit(nn.Linear(8, 8), body), torch.randn(4, 8)
    out = KeepingFrame(CheckpointedUnit("unit", unit), unit, (x,), {}).run((x,), {})
    assert seen[-1]() is None and out.requires_grad
