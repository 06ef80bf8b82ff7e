"""What only several units that run again together can get wrong."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autockpt.errors import ConflictError, RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import SAVE, Choice, Segment, dump_choice, parse_choice
from tests.errors import raises
from tests.policies.test_contract import gradients, planned
from tests.policies.zoo import CASES, Tally, assert_equal, bytes_alive_after, plain, train

pytestmark = pytest.mark.slow

WAYS = [Segment(size=2), Segment(size=99)]
each_way = pytest.mark.parametrize("way", WAYS, ids=str)

RANDOM_STATE = torch.get_rng_state().nbytes
SAMPLE = 8 * 4  # what is compared in unchecked calls


class Unit(nn.Module):
    """A unit whose forward is given from outside; ``calls`` counts how often it ran."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.body = body
        self.counter = Tally()

    @property
    def calls(self) -> int:
        return self.counter.calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.counter.calls += 1
        return self.body(self, *args, **kwargs)


def sigmoid(unit: nn.Module, x: Tensor) -> Tensor:
    return torch.dropout(unit.linear(x).sigmoid(), 0.2, True)


def in_a_row(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x)
    return x


class Stack(nn.Module):
    """Four units and what the parent does with them."""

    def __init__(self, parent: Callable[..., Tensor] = in_a_row, body: Callable[..., Any] = sigmoid) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Unit(body) for _ in range(4))
        self.parent = parent

    def forward(self, x: Tensor) -> Tensor:
        return self.parent(self.units, x)

    @property
    def calls(self) -> list[Any]:
        return [unit.calls for unit in self.units]


def choices(way: Choice) -> dict[str, Choice]:
    return {f"units.{i}": way for i in range(4)}


def run(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    seen: dict[str, Tensor] = {}
    for i in range(steps):
        x = torch.randn(256, 64).requires_grad_()
        model(x).pow(2).sum().backward()
        seen |= {f"{i} {n}": g for n, g in gradients(model).items()}
        seen[f"{i} random state"] = torch.get_rng_state()
        if x.grad is not None:
            seen[f"{i} input"] = x.grad
    return seen


def assert_as_plain(make: Callable[[], nn.Module], way: Choice) -> None:
    wanted, model = run(make()), make()
    with attach(model, choices(way)):
        assert_equal(run(model), wanted)


# --- how it is written


def test_in_a_plan():
    assert parse_choice("segment") == Segment(size=2)
    assert parse_choice({"kind": "segment", "size": 4}) == Segment(size=4)
    assert dump_choice(Segment()) == "segment"
    assert dump_choice(Segment(size=3)) == {"kind": "segment", "size": 3}
    assert str(Segment(size=3)) == "segment (size 3)"


def test_what_was_attached_is_told():
    model = nn.Sequential(*(Unit(sigmoid) for _ in range(7)))
    plan = {str(i): Segment(size=2) for i in range(7)} | {"3": SAVE}
    with attach(model, plan) as session:
        words = [session.attached[str(i)] for i in range(7)]
    assert words[0] == words[1] == "segment: 2 units from 0 to 1 run again together in backward"
    assert words[2].startswith("segment: alone")
    assert words[4] == words[5] and "from 4 to 5" in words[4]
    assert words[6].startswith("segment: alone")


# --- gradients


def _written_to_unseen_between(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x)
        x.data.clamp_(0.3, 0.6)
    return x


def _written_to_by_numpy_between(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x)
        x.detach().numpy()[0] *= 0.5
    return x


def _residual(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = x + unit(x)
    return x


def _in_place_between(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x).mul_(1.5)
    return x


def _detached_between(units: Any, x: Tensor) -> Tensor:
    x = units[1](units[0](x))
    return units[3](units[2](x.detach()) + x)


def _views_between(units: Any, x: Tensor) -> Tensor:
    x = units[0](x)
    return units[3](units[2](units[1](x.view_as(x)).t().t()).flip(0))


def _negative_between(units: Any, x: Tensor) -> Tensor:
    for unit in units:
        x = torch._neg_view(unit(x))  # type: ignore[attr-defined]
    return x


def _long_ways(units: Any, x: Tensor) -> Tensor:
    a = units[0](x)
    b = units[1](a)
    return units[3](units[2](b) + a) + b


def _skipped(units: Any, x: Tensor) -> Tensor:
    return units[2](units[0](x))


def _backwards(units: Any, x: Tensor) -> Tensor:
    return in_a_row(reversed(units), x)


def _side_by_side(units: Any, x: Tensor) -> Tensor:
    return units[0](x) + units[1](x) + units[2](x.detach()) + units[3](x)


def _unused(units: Any, x: Tensor) -> Tensor:
    units[1](units[0](x))
    return units[3](units[2](x))


PARENTS = [v for n, v in list(globals().items()) if n.startswith("_") and getattr(v, "__module__", "") == __name__]


@each_way
@pytest.mark.parametrize("parent", PARENTS, ids=lambda f: f.__name__.strip("_"))
def test_whatever_the_parent_does_between_units(parent: Callable[..., Tensor], way: Segment):
    if parent in (_written_to_unseen_between, _written_to_by_numpy_between):
        with pytest.raises(RerunMismatch):
            assert_as_plain(lambda: Stack(parent), way)
    else:
        assert_as_plain(lambda: Stack(parent), way)


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

    assert_as_plain(lambda: Stack(parent, body), way)


def test_gradients_taken_inside_a_unit():
    def body(unit, x):
        with torch.enable_grad():
            y = unit.linear(x).sigmoid()
            (force,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y + force

    def parent(units, x):
        return in_a_row(units, x.requires_grad_())

    assert_as_plain(lambda: Stack(parent, body), Segment(size=4))


@each_way
def test_inside_a_checkpoint_of_the_users_own_and_around_one(way: Segment):
    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def body(unit, x):
        return checkpoint(lambda y: torch.dropout(unit.linear(y).sigmoid(), 0.3, True), x, use_reentrant=False)

    assert_as_plain(Outer, way)
    assert_as_plain(lambda: Stack(body=body), way)


def test_backward_towards_some_parameters_only():
    def some(model: Stack) -> dict[str, Tensor]:
        torch.manual_seed(3)
        loss = model(torch.randn(8, 64)).pow(2).sum()
        seen = {}
        for i in (3, 1, 0, 2):
            seen[str(i)], *_ = torch.autograd.grad(loss, [model.units[i].linear.weight], retain_graph=True)
        return seen

    wanted, model = some(Stack()), Stack()
    with attach(model, choices(Segment(size=4))):
        assert_equal(some(model), wanted)


@each_way
def test_frozen_units_at_the_beginning_and_in_the_middle(way: Segment):
    def make() -> Stack:
        model = Stack(lambda units, x: in_a_row(units, x.detach()))
        model.units[0].requires_grad_(False)
        model.units[2].requires_grad_(False)
        return model

    assert_as_plain(make, way)


# --- what runs again


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_unit_runs_twice_in_a_step(size: int):
    model = Stack()
    with attach(model, choices(Segment(size=size))):
        with torch.no_grad():
            model(torch.randn(4, 64))
        assert model.calls == [1, 1, 1, 1]
        run(model, steps=1)
        assert model.calls == [3, 3, 3, 3]
        model.eval()
        run(model, steps=1)
        assert model.calls == [5, 5, 5, 5]


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


def test_a_pass_that_ends_early_holds_nothing_after_backward():
    """Without the root's forward, which would end it."""
    model = Stack()
    with attach(model, choices(Segment(size=4))):
        x = torch.randn(256, 64)
        model.units[1](model.units[0](x)).sum().backward()
        kept = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert kept() is None


def make_bytes(parent: Callable[..., Tensor], plan: dict[str, Choice]) -> int:
    model = Stack(parent)
    x = torch.randn(256, 64)
    with attach(model, plan):
        model(x)
        model(x)
        return bytes_alive_after(lambda: model(x))


TENSOR = 256 * 64 * 4


@pytest.mark.parametrize(("size", "boundaries"), [(1, 3), (2, 1), (3, 1), (4, 0)])
def test_nothing_but_the_input_of_each_region_is_kept(size: int, boundaries: int):
    """... and the output, which is the caller's, and of four calls a random state and a sample."""
    kept = make_bytes(in_a_row, choices(Segment(size=size)))
    assert kept == (boundaries + 1) * TENSOR + 4 * (RANDOM_STATE + SAMPLE)


def test_what_comes_from_between_the_units_is_kept():
    def parent(units, x):
        return units[3](units[2](units[1](units[0](x)) + 1))

    kept = make_bytes(parent, choices(Segment(size=4)))
    assert kept == 2 * TENSOR + 4 * (RANDOM_STATE + SAMPLE)


def test_hooks_with_new_tensors_over_old_memory_keep_nothing():
    """As those of FSDP2 and of full backward hooks do."""
    model, x = Stack(), torch.randn(256, 64, requires_grad=True)
    for unit in model.units:
        unit.register_full_backward_hook(lambda *_: None)
    with attach(model, choices(Segment(size=4))):
        model(x)
        model(x)
        assert bytes_alive_after(lambda: model(x)) == TENSOR + 4 * (RANDOM_STATE + SAMPLE)


@each_way
@pytest.mark.parametrize("parent", [in_a_row, *PARENTS], ids=lambda f: f.__name__.strip("_"))
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


def test_a_history_hidden_in_an_object_holds_nothing_in_a_circle():
    def body(unit, x, thing):
        return unit.linear(x + thing.x).sigmoid()

    def parent(units, x):
        for unit in units:
            x = unit(x, thing=SimpleNamespace(x=x))
        return x

    assert_as_plain(lambda: Stack(parent, body), Segment(size=4))
    model = Stack(parent, body)
    seen: list[weakref.ref[Any]] = []
    model.units[1].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out.untyped_storage())))
    with attach(model, choices(Segment(size=4))):
        model(torch.randn(8, 64))
        model(torch.randn(8, 64))
        assert seen[0]() is None


# --- what is refused


def test_a_unit_that_acts_differently_the_second_time_is_found():
    def fewer(unit, x):
        x = unit.linear(x)
        return x.sigmoid() if unit.calls > 1 else x.sigmoid().sigmoid()

    def more(unit, x):
        x = unit.linear(x)
        return x.sigmoid() if unit.calls == 1 else x.sigmoid().sigmoid()

    def other(unit, x):
        x = unit.linear(x)
        return (x.double() if unit.calls > 1 else x).sigmoid().float()

    for body in (fewer, more, other):
        model = Stack(body=body)
        with attach(model, choices(Segment(size=4))):
            loss = model(torch.randn(8, 64)).sum()
            with raises(ConflictError, "units."):
                loss.backward()


def test_compiled_code_breaks_at_each_unit_and_names_the_choice():
    model, wanted = Stack(), run(Stack())
    with attach(model, choices(Segment(size=2))):
        got = run(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
        assert_equal({name.replace("_orig_mod.", ""): value for name, value in got.items()}, wanted)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="choice `segment`"):
            torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 64))
    torch._dynamo.reset()


def test_copies_have_regions_of_their_own():
    model, wanted = planned(CASES["sequential"], "segment")[0], plain(CASES["sequential"])
    with attach(model, CASES["sequential"].choices(model, Segment(size=4))):
        twin = copy.deepcopy(model)
        loss = model(CASES["sequential"].batch()).sum()
        assert_equal(train(twin, CASES["sequential"]), wanted)
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())
