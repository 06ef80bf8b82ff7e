"""Programs with state that ordinary training has not: attributes, objects and hooks that a unit's forward changes.

``CHANGED``: what a unit does to attributes of one of its modules. ``OBJECTS``: kinds of objects, and how they change.
``REACHED``: what a unit does to things that are not its own.
"""

from __future__ import annotations

import array
import collections
import io
import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

D = 8


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


CHANGED = [
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


def two_units(change: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unit(change), Unit(change))


def steps(model: nn.Module, *, together: bool) -> dict[str, Tensor]:
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


# what makes an object, and what changes it and reads it
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "own class": (SimpleNamespace, lambda o: counted(vars(o))),
    "object in a tuple": (lambda: (SimpleNamespace(),), lambda o: counted(vars(o[0]))),
    "namespace in dicts": (lambda: {"a": {"b": SimpleNamespace()}}, lambda o: counted(vars(o["a"]["b"]))),
    "closure": (counting, lambda o: o()),
    "NumPy array": (lambda: np.zeros(1), lambda o: counted(o, 0)),
    "array": (lambda: array.array("i", [0]), lambda o: counted(o, 0)),
    "bytearray": (lambda: bytearray(1), lambda o: counted(o, 0)),
    "deque": (collections.deque, longer),
    "UserList": (collections.UserList, longer),
    "Counter": (collections.Counter, counted),
    "StringIO": (io.StringIO, lambda o: o.write(".") * o.tell()),
    "NumPy generator": (lambda: np.random.default_rng(1), lambda o: o.random()),
    "RandomState": (lambda: np.random.RandomState(1), lambda o: o.randn()),
    "random.Random": (lambda: random.Random(1), lambda o: o.gauss(0, 1)),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda o: float(torch.rand((), generator=o))),
    "iterator of a list": (lambda: iter(list(range(1, 99))), next),
    "iterator of a function": (lambda: iter(counting(), None), next),
    "generator": (lambda: (i for i in range(1, 99)), next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "map": (lambda: map(int, iter(range(1, 99))), next),
    "itertools.count": (lambda: itertools.count(1), next),
    "tensor by .data": (lambda: [torch.zeros(())], lambda o: o[0].data.add_(1).item()),
    "of one thread": (threading.local, lambda o: counted(vars(o))),
    "late, own class": (SimpleNamespace, lambda o: max(0, counted(vars(o)) - 3)),
    "late, NumPy array": (lambda: np.zeros(1), lambda o: max(0, counted(o, 0) - 3)),
}


class Holding(nn.Module):
    """A unit that keeps an object, or is given one with each call."""

    def __init__(self, make: Callable[[], Any], use: Callable[[Any], Any], given: bool) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(D, D), nn.Linear(D, D), use
        self.kept = None if given else make()

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return self.b(torch.tanh(self.a(x * (1 + 0.1 * self.use(given if self.kept is None else self.kept)))))


class WithObjects(nn.Module):
    """Two such units."""

    def __init__(self, name: str, *, given: bool) -> None:
        super().__init__()
        self.make, self.use = OBJECTS[name]
        self.layers = nn.ModuleList(Holding(self.make, self.use, given) for _ in range(2))
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        given = self.make() if self.given else None
        for layer in self.layers:
            x = layer(x, given)
        return x


def with_objects(name: str, *, given: bool) -> WithObjects:
    torch.manual_seed(0)
    return WithObjects(name, given=given)


def object_steps(model: nn.Module, count: int = 4) -> dict[str, Tensor]:
    """Gradients of steps, every other of them with two forwards before their backwards."""
    torch.manual_seed(1)
    seen: dict[str, Tensor] = {}
    for i in range(count):
        losses = [model(torch.randn(4, D, D)).pow(2).mean() for _ in range(1 + i % 2)]
        for loss in losses:
            loss.backward()
        seen |= {f"{i} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return seen


class Layer(nn.Module):
    """``change(self, x)`` is what it does besides; ``before``: the layer before it, no child of its."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], before: Layer | None) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.change = nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D), change
        self.before, self.ready, self.shared = [before] if before is not None else [], False, torch.ones(D)
        self.norm.scale = 1.0  # type: ignore[assignment]
        self.fast = [nn.Linear(D, D)]
        self.adam = torch.optim.Adam(self.fast[0].parameters(), lr=0.01)
        self.config: Any = None
        self.calls, self.model, self.far = 0, list[Any](), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.change(self, x)) + self.shared))


class Config(transformers.PretrainedConfig):
    calls = 0


class Reaching(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Tensor], config: Any) -> None:
        super().__init__()
        first = Layer(change, None)
        self.layers, self.bias = nn.ModuleList([first, Layer(change, first)]), nn.Parameter(torch.ones(D))
        self.config: Any = config
        for layer in self.layers:
            layer.config = config  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        shared = self.bias * 1.5
        for layer in self.layers:
            layer.shared = shared  # type: ignore[assignment]
            x = layer(x)
        return x * (1 + self.config.calls / 100)


def hook_on_a_parameter(layer: Any, x: Tensor) -> Tensor:
    if not layer.ready:
        layer.a.weight.register_hook(lambda gradient: gradient * 0.5)
        layer.ready = True
    return x


def hook_on_a_gradient_that_is_there(layer: Any, x: Tensor) -> Tensor:
    if not layer.ready:
        layer.a.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
        layer.ready = True
    return x


def hook_on_a_module(layer: Any, x: Tensor) -> Tensor:
    if not layer.ready:
        layer.b.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
        layer.ready = True
    return x


def another_unit_is_called(layer: Any, x: Tensor) -> Tensor:
    return x + sum(other(x) for other in layer.before)


def a_number_in_another_unit(layer: Any, x: Tensor) -> Tensor:
    for other in layer.before:
        other.norm.scale *= 0.9
    return x * layer.norm.scale


def an_optimizer_of_its_own(layer: Any, x: Tensor) -> Tensor:
    (layer.fast[0](x.detach()) - x.detach()).pow(2).mean().backward()
    layer.adam.step()
    layer.adam.zero_grad()
    return x + layer.fast[0](x.detach())


REACHED = [
    hook_on_a_parameter,
    hook_on_a_gradient_that_is_there,
    hook_on_a_module,
    another_unit_is_called,
    a_number_in_another_unit,
    an_optimizer_of_its_own,
]


def reaching_steps(model: Reaching) -> dict[str, Tensor]:
    seen = {}
    for step in range(4):
        model.zero_grad()
        x = torch.arange(4.0 * D).view(4, D).sin() * (step + 1)
        model(x).pow(2).sum().backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return seen | {name: buffer.clone() for name, buffer in model.named_buffers()}


def reaching(change: Callable[[Any, Tensor], Tensor], config: Callable[[], Any]) -> Reaching:
    torch.manual_seed(0)
    return Reaching(change, config())
