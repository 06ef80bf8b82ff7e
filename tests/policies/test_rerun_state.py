"""Plain attributes that a forward changes: it changes them once, and its second run finds what the first found."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autockpt.checkpointing.replay_context import recomputing
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.rerun_state import tensors
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, parse_choice
from tests.policies.zoo import Tally, assert_equal

CHOICES = [parse_choice("segment")]
AGAIN = parse_choice({"kind": "segment", "size": 1})


class Unit(nn.Module):
    """``change(self, x)`` reads and changes attributes; what is deeper down is found as well."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Inner(change)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x).sin()).sin()


class Inner(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.calls = 0
        self.seen: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.state: Tensor = torch.zeros(8)
        self.nested: dict[str, Any] = {"means": [[]], "sums": {"x": torch.zeros(8)}, "numbers": [random.Random(2)]}
        self.torch_numbers = torch.Generator().manual_seed(1)
        self.python_numbers = random.Random(1)
        self.numpy_numbers = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def counter(unit: Any, x: Tensor) -> Tensor:
    unit.calls += 1
    return x * unit.calls


def made_at_first_use(unit: Any, x: Tensor) -> Tensor:
    unit.turns = getattr(unit, "turns", 0) + 1
    return x.cos() if unit.turns % 2 else x.exp()


def adding_to_a_list(unit: Any, x: Tensor) -> Tensor:
    unit.seen.append(x.detach().mean())
    return x * sum(unit.seen)


def adding_to_a_dict(unit: Any, x: Tensor) -> Tensor:
    unit.named["last"] = x.detach() + unit.named.get("last", 0)
    return x * unit.named["last"]


def adding_to_a_list_in_a_dict(unit: Any, x: Tensor) -> Tensor:
    unit.nested["means"][0].append(x.detach().mean())
    return x * sum(unit.nested["means"][0])


def a_graph_in_a_list_in_a_dict(unit: Any, x: Tensor) -> Tensor:
    before = [mean.detach() for mean in unit.nested["means"][0]]
    unit.nested["means"][0].append(x.mean())
    return x * (1 + sum(before))


def a_tensor_in_a_dict_changed_in_place(unit: Any, x: Tensor) -> Tensor:
    out = (x + unit.nested["sums"]["x"]).sin()
    unit.nested["sums"]["x"] += x.detach().mean(0)
    return out


def a_tensor_in_a_dict_exchanged(unit: Any, x: Tensor) -> Tensor:
    unit.nested["sums"]["x"] = (unit.nested["sums"]["x"] + x.detach().mean(0)).tanh()
    return x * unit.nested["sums"]["x"]


def a_generator_in_a_list(unit: Any, x: Tensor) -> Tensor:
    return x * unit.nested["numbers"][0].random()


def state_handed_on(unit: Any, x: Tensor) -> Tensor:
    unit.state = (x + unit.state).tanh().detach()
    return x * unit.state


def state_with_a_graph(unit: Any, x: Tensor) -> Tensor:
    before, unit.last = getattr(unit, "last", None), x.tanh()
    return x.sin() if before is None else x * before.detach()


def state_changed_in_place(unit: Any, x: Tensor) -> Tensor:
    out = (x + unit.state).sin()
    unit.state.add_(x.detach().mean(0))
    return out


def own_generators(unit: Any, x: Tensor) -> Tensor:
    drawn = unit.python_numbers.random() + unit.numpy_numbers.random()
    return x * torch.rand(8, generator=unit.torch_numbers) * drawn


def made_before_a_gradient(unit: Any, x: Tensor) -> Tensor:
    """The gradient runs the unit again in the middle of its first forward."""
    if not hasattr(unit, "turns"):
        unit.turns = 0
        unit.register_buffer("mean", torch.zeros(8))
    unit.turns += 1
    unit.mean += x.detach().mean(0)
    (slope,) = torch.autograd.grad((x.sin() * unit.turns + unit.mean).exp().sum(), x, create_graph=True)
    return slope.sin()


CHANGES = [
    counter,
    made_at_first_use,
    adding_to_a_list,
    adding_to_a_dict,
    adding_to_a_list_in_a_dict,
    a_graph_in_a_list_in_a_dict,
    a_tensor_in_a_dict_changed_in_place,
    a_tensor_in_a_dict_exchanged,
    a_generator_in_a_list,
    state_handed_on,
    state_with_a_graph,
    state_changed_in_place,
    own_generators,
    made_before_a_gradient,
]


def make(change: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unit(change), Unit(change))


def run(model: nn.Module, *, together: bool) -> dict[str, Tensor]:
    """Four steps, or four forwards before their backwards; what the attributes hold afterwards, too."""
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        losses.append(model(torch.randn(4, 8)).pow(2).sum())
        if not together:
            losses.pop().backward()
    for loss in losses:
        loss.backward()
    seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    seen |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for i, unit in enumerate(m for m in model.modules() if isinstance(m, Inner)):
        kept = [unit.calls, len(unit.seen), getattr(unit, "turns", 0), unit.python_numbers.random()]
        seen |= {f"{i} plain": torch.tensor([*kept, unit.numpy_numbers.random()]), f"{i} state": unit.state.clone()}
        seen[f"{i} drawn"] = torch.rand(2, generator=unit.torch_numbers)
        seen |= {f"{i} {name}": value for name, value in unit.named.items()}
        means, (numbers,) = unit.nested["means"][0], unit.nested["numbers"]
        seen |= {f"{i} mean {n}": mean.detach() for n, mean in enumerate(means)}
        seen |= {f"{i} sums": unit.nested["sums"]["x"].clone(), f"{i} numbers": torch.tensor(numbers.random())}
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_each_forward_changes_them_once(change, choice, together):
    wanted, model = run(make(change), together=together), make(change)
    with attach(model, {"0": choice, "1": choice}):
        assert_equal(run(model, together=together), wanted)


def not_yet(unit: Any, x: Tensor) -> Tensor:
    return x.cos()


@pytest.mark.parametrize("change", [change for change in CHANGES if change is not made_before_a_gradient])
def test_what_begins_to_change_after_somebody_changed_the_unit(change):
    def steps(model: nn.Sequential) -> dict[str, Tensor]:
        run(model, together=False)
        for unit in model:
            unit.inner.change = change  # type: ignore[union-attr]
        model.zero_grad()
        return run(model, together=True)

    wanted, model = steps(make(not_yet)), make(not_yet)
    with attach(model, {"0": AGAIN, "1": AGAIN}):
        assert_equal(steps(model), wanted)


class Late(nn.Module):
    """Begins to change by itself after six calls; how many there were is no state of its own."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.tally, self.late = Inner(not_yet), Tally(), change

    def forward(self, x: Tensor) -> Tensor:
        self.tally.calls += torch.is_grad_enabled() and recomputing() is None
        return self.late(self.inner, x) if self.tally.calls > 6 else self.inner(x)


IN_PLACE = [state_changed_in_place, a_tensor_in_a_dict_changed_in_place]
BY_ITSELF = [(change, False) for change in CHANGES if change is not made_before_a_gradient]


@pytest.mark.parametrize(("change", "large"), [*BY_ITSELF, *((change, True) for change in IN_PLACE)])
def test_what_begins_to_change_by_itself_is_right_or_refused_once(change, large, monkeypatch):
    """Once: of a large tensor, of which there is no copy."""
    if large:
        monkeypatch.setattr(tensors, "QUIET_BYTES", 0)

    def steps(model: nn.Sequential, *, refused: bool = False) -> dict[str, Tensor]:
        run(model, together=False)
        for _ in range(2):  # after the look from outside that ends a run
            model(torch.randn(4, 8))
        if refused:
            with pytest.raises(ConflictError, match=r"0\.inner\..* is a tensor that this forward changed in place"):
                model(torch.randn(4, 8).requires_grad_()).sum().backward()
            for tensor in (model[0].inner.state, model[0].inner.nested["sums"]["x"]):  # type: ignore[union-attr]
                tensor.zero_()  # type: ignore[operator]
        model.zero_grad()
        return run(model, together=True)

    def late() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Late(change), nn.Linear(8, 8))

    wanted, model = steps(late()), late()
    with attach(model, {"0": AGAIN}):
        assert_equal(steps(model, refused=large), wanted)


def test_a_copy_has_attributes_of_its_own():
    wanted, model = run(make(counter), together=True), make(counter)
    with attach(model, {"0": RECOMPUTE, "1": RECOMPUTE}):
        twin = copy.deepcopy(model)
        assert_equal(run(model, together=True), wanted)
        assert_equal(run(copy.deepcopy(twin), together=True), wanted)


def test_a_state_that_the_caller_changes_before_backward_is_an_error():
    model = make(state_handed_on)
    with attach(model, {"0": AGAIN}):
        for _ in range(2):
            model(torch.randn(4, 8).requires_grad_()).sum().backward()
        before = model[0].inner.state
        loss = model(torch.randn(4, 8)).sum()
        before.zero_()
        with pytest.raises(InPlaceError, match=r"0\.inner\.state was changed in place"):
            loss.backward()


def test_graphs_are_not_held_by_those_that_follow():
    """Forwards without backward, each of which leaves a tensor with its graph in an attribute."""
    model = make(state_with_a_graph)
    with attach(model, {"0": RECOMPUTE, "1": RECOMPUTE}):
        left = []
        for _ in range(4):
            model(torch.randn(4, 8))
            left.append(weakref.ref(model[0].inner.last))
        gc.disable()
        try:
            assert [ref() is None for ref in left] == [True, True, True, False]
        finally:
            gc.enable()
