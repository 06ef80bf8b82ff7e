"""Programs with state that ordinary training has not: attributes, objects and hooks that a unit's forward changes.

``CHANGES`` are what a unit does to attributes of one of its modules, or to things that are not its own. ``OBJECTS`` are
kinds of objects, and how they change; a unit keeps one, or is given one with each call.
"""

from __future__ import annotations

import collections
import itertools
import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

D = 8
Change = Callable[[Any, Tensor], Tensor]
Use = Callable[[Any], Any]


def counting() -> Callable[[], int]:
    n = 0

    def tick() -> int:
        nonlocal n
        n += 1
        return n

    return tick


def counted(holder: Any, key: Any = "n") -> float:
    """One more in there; what there is then."""
    holder[key] = (holder.get(key, 0) if isinstance(holder, dict) else holder[key]) + 1
    return float(holder[key])


def longer(holder: Any) -> float:
    holder.append(1)
    return float(len(holder))


class Unit(nn.Module):
    """What is deeper down is found as well. ``before``: the unit before it, no child of its."""

    def __init__(self, change: Change | None, before: list[Unit], use: Use | None, kept: Any) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), Inner(change, before, use, kept), nn.Linear(D, D)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return self.last(self.inner(self.first(x).sin(), given).sin())


class Inner(nn.Module):
    """``change(self, x)`` reads and changes attributes; ``use`` does so with an object, ``kept`` or given."""

    def __init__(self, change: Change | None, before: list[Unit], use: Use | None, kept: Any) -> None:
        super().__init__()
        self.own, self.change, self.before, self.use, self.kept = nn.Linear(D, D), change, before, use, kept
        self.calls, self.ready, self.scale = 0, False, 1.0
        self.seen: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.state: Tensor = torch.zeros(D)
        self.nested: dict[str, Any] = {"means": [[]], "sums": {"x": torch.zeros(D)}, "numbers": [random.Random(2)]}
        self.torch_numbers = torch.Generator().manual_seed(1)
        self.python_numbers = random.Random(1)
        self.numpy_numbers = np.random.default_rng(1)
        self.fast = [nn.Linear(D, D)]
        self.adam = torch.optim.Adam(self.fast[0].parameters(), lr=0.01)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        if self.change is not None:
            return self.change(self, x)
        assert self.use is not None
        return x * (1 + 0.1 * self.use(self.kept if given is None else given))


class Program(nn.Module):
    """Two units; ``gives``: an object that ``make`` makes is given to both in each forward, and not kept."""

    def __init__(
        self,
        change: Change | None = None,
        make: Callable[[], Any] = lambda: None,
        use: Use | None = None,
        gives: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        keep = (lambda: None) if gives else make
        first = Unit(change, [], use, keep())
        self.units = nn.ModuleList([first, Unit(change, [first], use, keep())])
        self.make, self.gives = make, gives

    def forward(self, x: Tensor) -> Tensor:
        given = self.make() if self.gives else None
        for unit in self.units:
            x = unit(x, given)
        return x


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


def a_counter_in_a_dict(unit: Any, x: Tensor) -> Tensor:
    unit.named.setdefault("calls", torch.zeros(())).add_(1)
    return x.sin()


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
    return x * torch.rand(D, generator=unit.torch_numbers) * drawn


def made_before_a_gradient(unit: Any, x: Tensor) -> Tensor:
    """The gradient runs the unit again in the middle of its first forward."""
    if not hasattr(unit, "turns"):
        unit.turns = 0
        unit.register_buffer("mean", torch.zeros(D))
    unit.turns += 1
    unit.mean += x.detach().mean(0)
    (slope,) = torch.autograd.grad((x.sin() * unit.turns + unit.mean).exp().sum(), x, create_graph=True)
    return slope.sin()


# what makes an object, and what changes it and reads it
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "own class": (SimpleNamespace, lambda o: counted(vars(o))),
    "object in a tuple": (lambda: (SimpleNamespace(),), lambda o: counted(vars(o[0]))),
    "namespace in dicts": (lambda: {"a": {"b": SimpleNamespace()}}, lambda o: counted(vars(o["a"]["b"]))),
    "closure": (counting, lambda o: o()),
    "NumPy array": (lambda: np.zeros(1), lambda o: counted(o, 0)),
    "deque": (collections.deque, longer),
    "UserList": (collections.UserList, longer),
    "Counter": (collections.Counter, counted),
    "NumPy generator": (lambda: np.random.default_rng(1), lambda o: o.random()),
    "random.Random": (lambda: random.Random(1), lambda o: o.gauss(0, 1)),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda o: float(torch.rand((), generator=o))),
    "iterator of a list": (lambda: iter(list(range(1, 99))), next),
    "generator": (lambda: (i for i in range(1, 99)), next),
    "itertools.count": (lambda: itertools.count(1), next),
    "tensor by .data": (lambda: [torch.zeros(())], lambda o: o[0].data.add_(1).item()),
    "of one thread": (threading.local, lambda o: counted(vars(o))),
    "late, own class": (SimpleNamespace, lambda o: max(0, counted(vars(o)) - 3)),
    "late, NumPy array": (lambda: np.zeros(1), lambda o: max(0, counted(o, 0) - 3)),
}


def hook_on_a_parameter(unit: Any, x: Tensor) -> Tensor:
    if not unit.ready:
        unit.own.weight.register_hook(lambda gradient: gradient * 0.5)
        unit.ready = True
    return unit.own(x)


def hook_on_a_gradient_that_is_there(unit: Any, x: Tensor) -> Tensor:
    if not unit.ready:
        unit.own.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
        unit.ready = True
    return unit.own(x)


def hook_on_a_module(unit: Any, x: Tensor) -> Tensor:
    if not unit.ready:
        unit.own.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
        unit.ready = True
    return unit.own(x)


def another_unit_is_called(unit: Any, x: Tensor) -> Tensor:
    return x + sum(other(x) for other in unit.before)


def a_number_in_another_unit(unit: Any, x: Tensor) -> Tensor:
    for other in unit.before:
        other.inner.scale *= 0.9
    return x * unit.scale


def an_optimizer_of_its_own(unit: Any, x: Tensor) -> Tensor:
    (unit.fast[0](x.detach()) - x.detach()).pow(2).mean().backward()
    unit.adam.step()
    unit.adam.zero_grad()
    return x + unit.fast[0](x.detach())


RESTORED = [
    counter,
    made_at_first_use,
    adding_to_a_list,
    adding_to_a_dict,
    state_handed_on,
    state_with_a_graph,
    state_changed_in_place,
]
"""What is restored around a second run, whatever the choice."""

OTHERS = [
    adding_to_a_list_in_a_dict,
    a_graph_in_a_list_in_a_dict,
    a_tensor_in_a_dict_changed_in_place,
    a_counter_in_a_dict,
    a_tensor_in_a_dict_exchanged,
    a_generator_in_a_list,
    own_generators,
    made_before_a_gradient,
    hook_on_a_parameter,
    hook_on_a_gradient_that_is_there,
    hook_on_a_module,
    another_unit_is_called,
    a_number_in_another_unit,
    an_optimizer_of_its_own,
]

PROGRAMS: dict[str, Callable[[], Program]] = {
    **{change.__name__: partial(Program, change) for change in (*RESTORED, *OTHERS)},
    **{
        f"{name}, {'given' if gives else 'kept'}": partial(Program, None, make, use, gives)
        for name, (make, use) in OBJECTS.items()
        for gives in (False, True)
    },
}


def steps(model: Program) -> dict[str, Tensor]:
    """Four steps, every other with two forwards before their backwards; what the attributes hold afterwards, too."""
    torch.manual_seed(1)
    seen: dict[str, Tensor] = {}
    for i in range(4):
        losses = [model(torch.randn(4, D)).pow(2).mean() for _ in range(1 + i % 2)]
        for loss in losses:
            loss.backward()
        seen |= {f"{i} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    seen |= dict(model.named_buffers())
    for i, unit in enumerate(model.units):
        for name, value in vars(unit.inner).items():  # type: ignore[arg-type]
            seen |= held(value, f"{i} {name}") if name not in ("before", "kept", "fast") else {}
    return seen


def held(value: Any, name: str) -> dict[str, Tensor]:
    """Numbers and tensors in an attribute; of generators what they draw next."""
    if isinstance(value, Tensor):
        return {name: value.detach()}
    if isinstance(value, int | float):
        return {name: torch.tensor(value)}
    if isinstance(value, torch.Generator):
        return {name: torch.rand(2, generator=value)}
    if isinstance(value, random.Random | np.random.Generator):
        return {name: torch.tensor(value.random())}
    parts = value.items() if type(value) is dict else enumerate(value) if isinstance(value, list) else ()
    return {key: found for at, part in parts for key, found in held(part, f"{name} {at}").items()}
