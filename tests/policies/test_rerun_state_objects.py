"""State of every kind, wherever it is kept: changed once by each forward, or the choice is refused by name."""

from __future__ import annotations

import array
import collections
import contextvars
import csv
import ctypes
import dataclasses
import functools
import io
import itertools
import mmap
import multiprocessing
import random
import re
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.func import functional_call, stack_module_state, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.errors import ConflictError, InPlaceError, RerunMismatch
from autockpt.policies.rerun_state import tensors
from autockpt.policies.rerun_state.fields import attributes
from autockpt.policies.rerun_state.kinds import Sets
from autockpt.policies.rerun_state.tensors import TENSORS, NotPutBackError
from autockpt.runtime import attach
from autockpt.schema.choices import KeepAttention, parse_choice
from tests.policies.zoo import assert_equal

D = 8
CHOICES = [Segment(size=2)]
each_choice = pytest.mark.parametrize("choice", CHOICES, ids=str)


class Box:
    n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


class Resumable(Stateful):
    """Of torch.distributed.checkpoint's, by its own account."""

    n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n = state_dict["n"]


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclasses.dataclass
class Flow:
    h: Tensor
    n: int = 0


class Hidden(Slots):
    """Properties before what it keeps."""

    __slots__ = ("__dict__",)

    def fail(self, *_: Any) -> Any:
        raise AssertionError

    n = own = property(fail)  # type: ignore[assignment]

    def __init__(self) -> None:
        vars(Slots)["n"].__set__(self, 0)
        vars(self)["own"] = 0

    def count(self) -> int:
        vars(Slots)["n"].__set__(self, vars(Slots)["n"].__get__(self) + 1)
        vars(self)["own"] += 1
        return vars(Slots)["n"].__get__(self) + vars(self)["own"]


class Odd:
    """Runs no code of its own for those who only look."""

    def __init__(self) -> None:
        self.n = 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError

    @property
    def costly(self) -> int:
        raise AssertionError


def odd_kind(base: Any) -> Any:
    """A class on ``base`` that does not let anybody look by its own methods."""

    def fail(*_: Any) -> Any:
        raise AssertionError(base)

    special = ("iter", "getitem", "len", "contains", "eq", "or", "ror", "copy", "array", "array_function")
    names = [f"__{name}__" for name in special] + ["keys", "values", "items", "get", "copy", "union", "get_state"]
    asked = {"__class__": property(fail)} if base is np.ndarray else {"__getattribute__": fail}
    return type("Odd", (base,), {**dict.fromkeys(names, fail), **asked, "__hash__": object.__hash__})


def odd_containers() -> dict[Any, Any]:
    held: dict[Any, Any] = {kind: odd_kind(kind)() for kind in (dict, collections.OrderedDict, set, collections.deque)}
    for key in "ab":
        dict.__setitem__(held[dict], key, 1)
        collections.OrderedDict.__setitem__(held[collections.OrderedDict], key, 1)
    held[np.ndarray] = array = np.zeros(2).view(type("Open", (np.ndarray,), {}))
    array.__class__ = odd_kind(np.ndarray)
    held[Box] = Box()
    held[Box].__dict__ = odd_kind(dict)(n=0)
    return {**held, list: odd_kind(list)(), np.random.RandomState: odd_kind(np.random.RandomState)(1), "calls": 0}


def odd_containers_change(held: dict[Any, Any]) -> float:
    """All from the first call on, but from the fourth on an order of keys and an object's own dictionary."""
    held["calls"] += 1
    n = dict.__getitem__(held[dict], "a")
    order, array, own = held[collections.OrderedDict], held[np.ndarray], attributes(held[Box])
    if held["calls"] > 3:
        collections.OrderedDict.move_to_end(order, next(collections.OrderedDict.__iter__(order)))
        dict.__setitem__(own, "n", n)
    dict.__setitem__(held[dict], "a", n + 1)
    collections.OrderedDict.__setitem__(order, "b", n)
    list.append(held[list], n)
    set.add(held[set], n)
    collections.deque.append(held[collections.deque], n)
    np.ndarray.__setitem__(array, 0, n)
    first = collections.OrderedDict.__getitem__(order, next(collections.OrderedDict.__iter__(order)))
    drawn = np.random.RandomState.random_sample(held[np.random.RandomState])
    sizes = [kind.__len__(held[kind]) for kind in (list, set, collections.deque)]
    return n + first + drawn + sum(sizes) + np.ndarray.__getitem__(array, 0) + dict.__getitem__(own, "n")


def counting() -> Callable[[], int]:
    n = 0

    def tick() -> int:
        nonlocal n
        n += 1
        return n

    return tick


def add(holder: Any, name: Any = "n") -> float:
    """One more under a name or index; what there is then."""
    if isinstance(name, str) and not isinstance(holder, dict):
        setattr(holder, name, getattr(holder, name) + 1)
        return float(getattr(holder, name))
    holder[name] += 1
    return float(holder[name])


def longer(holder: Any) -> float:
    holder.append(1)
    return float(len(holder))


def remembering() -> Callable[[], Box]:
    remembered = functools.lru_cache(Box)
    remembered()
    return remembered


COUNT, NUMBERS, VAR = [0], np.random.default_rng(1), contextvars.ContextVar("VAR", default=0)


def of_the_module(_: Any) -> float:
    COUNT[0] += 1
    return COUNT[0] + NUMBERS.random()


def of_the_context(_: Any) -> float:
    VAR.set(VAR.get() + 1)
    return float(VAR.get())


def of_the_class(_: Any) -> float:
    Box.n += 1
    return float(Box.n)


class Pair(ctypes.Structure):
    _fields_ = [("p", ctypes.c_byte), ("n", ctypes.c_int)]


class Local(threading.local):
    n = 0


BOXES = [Box(), Box()]
HELD: contextvars.ContextVar[Box] = contextvars.ContextVar("HELD")


def memory_of_many_kinds() -> dict[Any, Any]:
    HELD.set(Box())
    for box in BOXES:
        box.n = 0
    return {
        "calls": 0,
        "back": reversed(list(range(99))),
        "bits": np.random.PCG64(1),
        "value": [ctypes.c_int(0), multiprocessing.Value("i", 0), multiprocessing.RawValue("i", 0)],
        "n": [Pair(), Local(), weakref.proxy(BOXES[0])],
        "deeper": (weakref.WeakValueDictionary(box=BOXES[1]), np.array([Box()], dtype=object), ctypes.pointer(Pair())),
        0: [(ctypes.c_int * 2)(), memoryview(bytearray(2)), mmap.mmap(-1, 16), MappingProxyType({0: [0]})[0]],
        "error": ValueError(0),
    }


def later_on(kept: dict[Any, Any]) -> float:
    """From the fourth call on all move on: changes that nobody has met on first calls."""
    kept["calls"] += 1
    if kept["calls"] < 4:
        return 0.0
    kept["error"].args = (kept["error"].args[0] + 1,)
    refs, array, pointer = kept["deeper"]
    more = add(refs["box"]) + add(array[0]) + add(pointer.contents) + add(HELD.get())
    return (
        kept["error"].args[0]
        + next(kept["back"])
        + float(kept["bits"].random_raw() % 9)
        + more
        + sum(add(holder, name) for name in ("value", "n", 0) for holder in kept[name])
    )


class Words(tuple):
    pass


class Low:
    value = 1


class High:
    value = 2


def holders_of_many_kinds() -> dict[str, Any]:
    for name in ("MADE", "LATER"):
        globals().pop(name, None)
    weight = nn.Parameter(torch.ones(1), requires_grad=False)
    holders = [torch.ones(1), weight, lambda: 0, functools.partial(int), Words(), type("Own", (), {})]
    return {
        "calls": 0,
        "holders": holders,
        "order": collections.OrderedDict(a=1, b=2, c=3),
        "keys": {0: None},
        "role": Low(),
    }


def attributes_later_on(kept: dict[str, Any]) -> float:
    """From the fourth call on there are attributes and globals that were not, and keys in another order."""
    global MADE
    kept["calls"] += 1
    if kept["calls"] < 4:
        return 0.0
    for holder in kept["holders"]:
        holder.n = getattr(holder, "n", 0) + 1
    MADE = globals().get("MADE", 0) + 1
    globals()["LATER"] = globals().get("LATER", 0) + 1
    kept["order"].move_to_end(next(iter(kept["order"])))
    del kept["keys"][(key := min(kept["keys"]))]
    kept["keys"][key + 1] = None
    kept["role"].__class__ = High if type(kept["role"]) is Low else Low
    first = next(iter(kept["order"].values())) * kept["role"].value
    return sum(h.n for h in kept["holders"]) + MADE + 3 * globals()["LATER"] + 5 * first + 7 * min(kept["keys"])


def drawing() -> Any:
    """A distribution with a generator of its own."""
    distribution: Any = stats.norm(0, 1)
    distribution.random_state = np.random.default_rng(1)
    return distribution


def caused(error: ValueError) -> int:
    error.__cause__ = KeyError(error.__cause__.args[0] + 1 if error.__cause__ else 1)
    return error.__cause__.args[0]


# what makes an object, and what changes it and reads it
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "own class": (Box, add),
    "slots": (Slots, add),
    "odd class": (Odd, add),
    "behind properties": (Hidden, Hidden.count),
    "keys of a dictionary": (lambda: dict.fromkeys([Box()]), lambda o: add(next(iter(o)))),
    "protocol of a library's": (Resumable, add),
    "namespace in dicts": (lambda: {"a": {"b": SimpleNamespace(n=0)}}, lambda o: add(o["a"]["b"])),
    "object in a tuple": (lambda: (Box(),), lambda o: add(o[0])),
    "bound method": (lambda: Box().tick, lambda o: o()),
    "closure": (counting, lambda o: o()),
    "partial": (lambda: functools.partial(longer, []), lambda o: o()),
    "NumPy array": (lambda: np.zeros(1), lambda o: add(o, 0)),
    "array": (lambda: array.array("i", [0]), lambda o: add(o, 0)),
    "bytearray": (lambda: bytearray(1), lambda o: add(o, 0)),
    "UserList": (collections.UserList, longer),
    "deque": (collections.deque, longer),
    "Counter": (collections.Counter, lambda o: add(o, "n")),
    "StringIO": (io.StringIO, lambda o: o.write(".") * o.tell()),
    "NumPy generator": (lambda: np.random.default_rng(1), lambda o: o.random()),
    "RandomState": (lambda: np.random.RandomState(1), lambda o: o.randn()),
    "random.Random": (lambda: random.Random(1), lambda o: o.gauss(0, 1)),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda o: float(torch.rand((), generator=o))),
    "iterator of a list": (lambda: iter(list(range(99))), next),
    "iterator of a range": (lambda: iter(range(1, 99, 2)), next),
    "iterator of a text": (lambda: iter("aé" * 50), lambda it: ord(next(it)) % 7),
    "iterator of an array": (lambda: iter(array.array("i", range(99))), next),
    "iterator of a NumPy array": (lambda: iter(np.arange(99)), next),
    "iterator of a function": (lambda: iter(Box().tick, None), next),
    "the cause of an error": (lambda: ValueError("x"), caused),
    "what a bounded cache keeps": (remembering, lambda o: add(o())),
    "itertools.count": (itertools.count, next),
    "itertools.count of halves": (lambda: itertools.count(0.5, 0.5), next),
    "tensor by .data": (lambda: [torch.zeros(())], lambda o: o[0].data.add_(1).item()),
    "thread's own": (threading.local, lambda o: setattr(o, "n", getattr(o, "n", 0) + 1) or o.n),
    "memory and errors, late": (memory_of_many_kinds, later_on),
    "attributes and keys, late": (holders_of_many_kinds, attributes_later_on),
    "odd containers": (odd_containers, odd_containers_change),
    "globals": (Box, of_the_module),
    "a class": (Box, of_the_class),
    "a context variable": (Box, of_the_context),
    "sequence of SciPy's": (lambda: stats.qmc.Sobol(1, seed=1), lambda o: float(o.random()[0, 0])),
    "distribution of SciPy's": (drawing, lambda o: float(o.rvs())),
}


class Block(nn.Module):
    def __init__(self, make: Callable[[], Any], use: Callable[[Any], Any], given: bool) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(D, D), nn.Linear(D, D), use
        self.kept = None if given else make()

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return self.b(torch.tanh(self.a(x * (1 + 0.1 * self.use(given if self.kept is None else self.kept)))))


class Model(nn.Module):
    def __init__(self, name: str, *, given: bool) -> None:
        super().__init__()
        self.make, self.use = OBJECTS[name]
        self.layers = nn.ModuleList(Block(self.make, self.use, given) for _ in range(2))
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        given = self.make() if self.given else None
        for layer in self.layers:
            x = layer(x, given)
        return x


def steps(model: nn.Module, count: int = 4) -> dict[str, Tensor]:
    """Gradients, weights and buffers of steps, every other of them with two forwards before their backwards."""
    torch.manual_seed(1)
    seen: dict[str, Tensor] = {}
    for i in range(count):
        losses = [model(torch.randn(4, D, D)).pow(2).mean() for _ in range(1 + i % 2)]
        for loss in losses:
            loss.backward()
        seen |= {f"{i} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        seen |= {f"{i} weight {n}": p.detach().clone() for n, p in model.named_parameters()}
        seen |= {f"{i} buffer {n}": b.clone() for n, b in model.named_buffers()}
    return seen


def trained(make: Callable[[], nn.Module], choice: Any = None) -> dict[str, Tensor]:
    """What training leaves behind, from a beginning that is always the same."""
    global NUMBERS
    torch.manual_seed(0)
    NUMBERS, COUNT[0], Box.n = np.random.default_rng(1), 0, 0
    np.random.seed(0)

    def run() -> dict[str, Tensor]:
        model = make()
        with attach(model, {} if choice is None else {"layers.0": choice, "layers.1": choice}):
            return steps(model)

    return contextvars.copy_context().run(run)


@pytest.mark.slow
@each_choice
@pytest.mark.parametrize("given", [False, True], ids=["kept", "given"])
@pytest.mark.parametrize("name", OBJECTS)
def test_each_forward_changes_it_once(name, given, choice):
    def make() -> nn.Module:
        return Model(name, given=given)

    assert_equal(trained(make, choice), trained(make))


def second_time_round(cycle: itertools.cycle) -> itertools.cycle:
    for _ in range(5):
        next(cycle)
    return cycle


@each_choice
@pytest.mark.parametrize("given", [False, True], ids=["kept", "given"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (i for i in range(99)),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: second_time_round(itertools.cycle([1, 2, 3])),
        lambda: reversed((1, 2, 3)),
        lambda: iter(collections.deque([1, 2, 3])),
        lambda: map(int, iter([1, 2, 3])),
        lambda: enumerate([1, 2]),
        lambda: filter(None, itertools.count()),
        lambda: iter(collections.OrderedDict.fromkeys((1, 2, 3))),
        lambda: iter(memoryview(b"123")),
        lambda: struct.iter_unpack("b", b"123"),
        lambda: itertools.tee((1, 2, 3))[1],
        lambda: re.finditer(".", "123"),
        lambda: np.arange(1, 4).flat,
        lambda: np.nditer(np.arange(1, 4)),
        lambda: csv.reader(["1", "2", "3"]),
    ],
    ids=[
        *("generator", "cycle", "cycle later", "reversed", "deque", "map", "enumerate", "count in a filter"),
        *("ordered", "memory", "struct", "tee", "matches", "flat", "nditer", "csv"),
    ],
)
def test_what_only_goes_forwards_is_refused_if_it_advanced(make, given, choice, monkeypatch):
    for use, refused in ((next, True), (lambda _: 1, False)):
        monkeypatch.setitem(OBJECTS, "it", (make, lambda it, use=use: 1 if use(it) else 2))
        model = Model("it", given=given)
        with attach(model, {"layers.0": choice, "layers.1": choice}):
            if not refused:
                model(torch.randn(4, D)).sum().backward()
                continue
            with pytest.raises(ConflictError, match=r"layers\.[01] advances (layers\.[01]\.kept|the argument)"):
                model(torch.randn(4, D)).sum().backward()


@given(st.lists(st.text(max_size=4)), st.lists(st.text(max_size=4), max_size=3), st.integers(0, 3))
def test_sets_are_put_back_in_their_order_or_refused(first, added, dropped):
    """Which depends on hashes, and on what came and went; those that are as they were stay."""
    elements, kind = set(first), Sets()
    taken, order = kind.take(elements, close=True), [*elements]
    kind.put(elements, taken)
    assert [*elements] == order and kind.unchanged(elements, taken)
    elements.update(added)
    elements.difference_update(order[:dropped])
    try:
        kind.put(elements, taken)
    except NotPutBackError:
        assert added or dropped
    else:
        assert [*elements] == order


def test_a_record_of_numpys_is_refused_if_it_changed(monkeypatch):
    def use(record: Any) -> int:
        record["n"] += 1
        return int(record["n"])

    monkeypatch.setitem(OBJECTS, "it", (lambda: np.zeros(1, [("n", "i4")])[0], use))
    refused = pytest.raises(ConflictError, match=r"layers\.0 advances layers\.0\.kept")
    with attach(model := Model("it", given=False), {"layers.0": KeepAttention()}), refused:
        model(torch.randn(4, D)).sum().backward()


@pytest.mark.parametrize("make", [np.random.SeedSequence, np.random.default_rng], ids=["sequence", "generator"])
def test_what_spawns_generators_is_refused(make, monkeypatch):
    def spawned(source: Any) -> float:
        return np.random.default_rng(source.spawn(1)[0]).random()

    monkeypatch.setitem(OBJECTS, "it", (make, spawned))
    refused = pytest.raises(ConflictError, match=r"layers\.0 advances layers\.0\.kept")
    with attach(model := Model("it", given=False), {"layers.0": KeepAttention()}), refused:
        model(torch.randn(4, D)).sum().backward()


class Stage(nn.Module):
    """A unit with ``setup(self)`` and ``use(self, x)``."""

    def __init__(self, setup: Callable[[Any], Any], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(D, D), nn.Linear(D, D), use
        setup(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.use(self, x))))


class Stages(nn.Module):
    def __init__(self, setup: Callable[[Any], Any], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.layers = nn.ModuleList(Stage(setup, use) for _ in range(2))
        for layer in self.layers:
            layer.__dict__["parent"] = self

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length).float() / 10


def tagging(unit: Any) -> None:
    unit.register_forward_hook(lambda module, args, out: setattr(out, "tag", 3.0))


def norm_in_a_list(unit: Any) -> None:
    unit.norms = [nn.BatchNorm1d(D)]
    unit.register_buffer("mirror", unit.norms[0].running_mean)


def norm_in_a_closure(unit: Any) -> None:
    norm = nn.BatchNorm1d(D)
    unit.norm = lambda x: norm(x)
    unit.register_buffer("mirror", norm.running_mean)


def with_settings(unit: Any) -> None:
    unit.settings = ModuleType("settings")
    unit.settings.n = 0


def settings_counted(unit: Any, x: Tensor) -> Tensor:
    unit.settings.n += 1
    return x * (1 + 0.1 * unit.settings.n)


def with_key(unit: Any) -> None:
    unit.k = nn.Parameter(torch.eye(D), requires_grad=False)


def normalized(unit: Any, x: Tensor) -> Tensor:
    unit.a.weight.data = nn.functional.normalize(unit.a.weight.data, dim=1)
    return x


def own_counter(unit: Any) -> None:
    tick = counting()
    unit.a.register_forward_hook(lambda module, args, out: out * tick())


def routed(unit: Any, x: Tensor) -> Tensor:
    share = unit.gate(x).softmax(-1)
    unit.load += share.detach().sum((0, 1))
    unit.aux = share.pow(2).mean()
    return x * share[..., :1]


def with_gate(unit: Any) -> None:
    unit.gate, unit.aux = nn.Linear(D, 4), None
    unit.register_buffer("load", torch.zeros(4))


def rotary(unit: Any, x: Tensor) -> Tensor:
    if unit.table is None or len(unit.table) < x.shape[1]:
        unit.table = table(x.shape[1])
        unit.masks[x.shape[1]] = torch.ones(D)
    return x * unit.table[None, :, None].cos() * unit.masks[x.shape[1]]


def tuned(unit: Any, x: Tensor) -> Tensor:
    if (key := tuple(x.shape)) not in unit.best:
        unit.best[key] = min((len(str(k)), k) for k in (2, 3))[1]
    unit.calls += 1
    return x * unit.best[key]


def cast_once(unit: Any, x: Tensor) -> Tensor:
    if unit.w.dtype != torch.float32:
        unit.w.data = unit.w.data.float()
    return x * unit.w


def with_double(unit: Any) -> None:
    unit.w = nn.Parameter(torch.full((D,), 1.5, dtype=torch.float64), requires_grad=False)


def clamped(unit: Any, x: Tensor) -> Tensor:
    unit.a.weight.data.clamp_(-0.2, 0.2)
    return x


def clamped_input(unit: Any, x: Tensor) -> Tensor:
    x.data.clamp_(-0.5, 0.5)
    return x


def with_entries(unit: Any) -> None:
    unit.entries = nn.ParameterDict({"x": torch.ones(D), "y": torch.zeros(D)})


def swapped(unit: Any, x: Tensor) -> Tensor:
    unit.entries["x"], unit.entries["y"] = unit.entries["y"], unit.entries["x"]
    return x * (1 + unit.entries["x"])


def of_gradients(unit: Any, x: Tensor) -> Tensor:
    """Adds to a ``.grad``, by a backward for which nothing is saved, and reads it."""
    unit.calls += 1
    if unit.calls < 4:
        return x
    (unit.a.bias + 1).sum().backward()
    return x * (1 + unit.a.bias.grad.mean())


def gradient_under_a_label(unit: Any, x: Tensor) -> Tensor:
    with torch.autograd.profiler.record_function("unit"):
        return x if unit.a.bias.grad is None else x * (1 + unit.a.bias.grad.mean())


def with_statistics(unit: Any) -> None:
    unit.calls, unit.norm, unit.sn = 0, nn.BatchNorm1d(D), nn.utils.spectral_norm(nn.Linear(D, D))
    unit.mean = torch.zeros(D)
    for name, value in (("book", torch.eye(D)), ("low", torch.zeros(D)), ("wide", torch.ones(D))):
        unit.register_buffer(name, value)


def statistics_later_on(unit: Any, x: Tensor) -> Tensor:
    """Buffers that change in place from the fourth call on, and NumPy's random numbers."""
    unit.calls += 1
    if unit.calls < 4:
        return x
    with torch.no_grad():
        unit.mean.mul_(0.9).add_(x.mean((0, 1)))
        unit.book.index_add_(0, torch.tensor([unit.calls % D]), x[:1, 0])
    x = nn.functional.batch_norm(unit.norm(x.mT), unit.low, unit.wide, training=True).mT
    return unit.sn(x) @ unit.book.clone() * (unit.mean + unit.low) * np.random.randn()


@functools.cache
def drawn(unit: Any, step: int) -> Tensor:
    return torch.randn(D)


def drawn_later_on(unit: Any, x: Tensor) -> Tensor:
    """What a cached function draws, and a gradient that forward itself adds up, from the fourth call on."""
    unit.calls += 1
    if unit.calls < 4:
        return x
    unit.k.grad = torch.ones(D, D) if unit.k.grad is None else unit.k.grad + 1
    return nn.functional.dropout(x + drawn(unit, unit.calls // 2), 0.3) * unit.k.grad.mean()


def patched(unit: Any, x: Tensor) -> Tensor:
    """Puts a forward around its child's, and turns a weight round, once and late."""
    unit.calls += 1
    if unit.calls == 4:
        inner, unit.a.weight.data = unit.a.forward, unit.a.weight.data.t()
        unit.a.forward = lambda x: inner(x) * 1.5
    return x


def ensemble(unit: Any) -> None:
    """Weights of several modules in one, and the module that they are called by without weights of its own."""
    members = [nn.Linear(D, D) for _ in range(3)]
    stacked, _ = stack_module_state(members)
    unit.members = nn.ParameterDict({name: nn.Parameter(value.detach()) for name, value in stacked.items()})
    unit.base, unit.form = [nn.Linear(D, D, device="meta")], torch.empty(3, device="meta")


def mean_of_ensemble(unit: Any, x: Tensor) -> Tensor:
    unit.form.add_(1)
    return vmap(lambda weights: functional_call(unit.base[0], weights, (x,)))(dict(unit.members)).mean(0)


STAGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Tensor]]] = {
    "norm in a list": (norm_in_a_list, lambda unit, x: unit.norms[0](x)),
    "norm in a closure": (norm_in_a_closure, lambda unit, x: unit.norm(x)),
    "norm of the parent": (lambda unit: None, lambda unit, x: unit.parent.norm(x)),
    "a Python module that is held": (with_settings, settings_counted),
    "normalized weight": (lambda unit: None, normalized),
    "attribute of the input": (tagging, lambda unit, x: x * getattr(x, "tag", 1.0)),
    "hook with a counter": (own_counter, lambda unit, x: x),
    "experts' statistics": (with_gate, routed),
    "rotary and mask caches": (lambda unit: unit.__dict__.update(table=None, masks={}), rotary),
    "autotuning": (lambda unit: unit.__dict__.update(best={}, calls=0), tuned),
    "cast at the first call": (with_double, cast_once),
    "small weight that moves on": (with_key, lambda unit, x: x * unit.k.data.mul_(0.9).sum()),
    "clamped weight": (lambda unit: None, clamped),
    "clamped input": (lambda unit: None, clamped_input),
    "entries swapped": (with_entries, swapped),
    "statistics, late": (with_statistics, statistics_later_on),
    "drawn, late": (lambda unit: (with_key(unit), setattr(unit, "calls", 0)), drawn_later_on),
    "patched, late": (lambda unit: unit.__dict__.update(calls=0), patched),
    "tensors on meta": (ensemble, mean_of_ensemble),
    "a gradient, and another thing of autograd": (lambda unit: None, gradient_under_a_label),
    "gradients taken inside, late": (lambda unit: unit.__dict__.update(calls=0), of_gradients),
}


@pytest.mark.slow
@each_choice
@pytest.mark.parametrize("name", STAGES)
def test_modules_and_weights(name, choice):
    def make() -> nn.Module:
        return Stages(*STAGES[name])

    assert_equal(trained(make, choice), trained(make))


@each_choice
def test_a_weight_changed_in_place_unseen_is_refused_before_harm(choice, monkeypatch):
    monkeypatch.setattr(tensors, "SMALL_BYTES", 0)  # of small ones there is a copy
    model = Stages(with_key, lambda unit, x: x * unit.k.data.mul_(0.9).sum())
    words = r"layers\.0 changes one of its parameters, layers\.0\.k"
    with attach(model, {"layers.0": choice, "layers.1": choice}), pytest.raises(ConflictError, match=words):
        model(torch.randn(4, D, D))


class Functions(TorchFunctionMode):
    n = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * add(self) if func is nn.functional.linear else out


RECENT: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()


def weakly_held(unit: Any) -> None:
    unit.recent = RECENT
    unit.register_forward_hook(lambda module, args, out: RECENT.__setitem__("hidden", out))


def after_the_one_before(unit: Any, x: Tensor) -> Tensor:
    """Goes by the hidden state of the layer before, as long as anybody else holds that."""
    before = RECENT.get("hidden")
    return x if before is None else x * float(before.detach().mean())


@pytest.mark.parametrize("sentinels", ["off", "sample"])
def test_a_weak_reference_to_an_activation_is_refused_by_what_runs_twice(sentinels, monkeypatch):
    monkeypatch.setenv("AUTOCKPT_SENTINELS", sentinels)
    make = lambda: Stages(weakly_held, after_the_one_before)  # noqa: E731
    with pytest.raises(ConflictError, match=r"layers\.1\.recent\.data.* is a weak reference to an activation"):
        trained(make, Segment(size=1))


@each_choice
def test_modes_that_count(choice):
    """In force around forwards from the fourth on."""

    def losses(model: nn.Module) -> list[Tensor]:
        mode, seen = Functions(), []
        for i in range(5):
            with mode if i > 2 else nullcontext():
                loss = model(torch.ones(2, D, D)).sin().sum()
            loss.backward()
            seen += [loss.detach(), torch.tensor(mode.n), *(p.grad.clone() for p in model.parameters())]
        return seen

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Stage(lambda unit: None, lambda unit, x: x) for _ in range(2)))

    wanted, model = losses(make()), make()
    with attach(model, {"0": choice, "1": choice}):
        assert all(map(torch.equal, wanted, losses(model)))


class Ops(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * add(self) if func is torch.ops.aten.tanh.default else out


@each_choice
def test_a_dispatch_mode_whose_results_go_by_its_count_is_never_passed_over(choice):
    """Late, where sentinels look at few calls."""
    model, mode = nn.Sequential(*(Stage(lambda unit: None, lambda unit, x: x) for _ in range(2))), Ops()
    with attach(model, {"0": choice, "1": choice}):
        for _ in range(4):
            model(torch.ones(2, D, D)).sin().sum().backward()
        with mode:
            loss = model(torch.ones(2, D, D)).sin().sum()
        with pytest.raises(RerunMismatch):
            loss.backward()


@dataclasses.dataclass
class Between:
    """Something that changes between forward and backward, and afterwards back."""

    use: Callable[[Any, Tensor], Tensor]
    change: Callable[[Any], Any]
    back: Callable[[Any], Any]


def hooked(unit: Any) -> None:
    unit.hook = unit.a.register_forward_hook(lambda module, args, out: out + 1)


BETWEEN = {
    "eval": Between(lambda unit, x: x * (2 if unit.training else 1), lambda u: u.eval(), lambda u: u.train()),
    "attribute": Between(lambda u, x: x * u.s, lambda u: setattr(u, "s", 0.5), lambda u: setattr(u, "s", 1.5)),
    "object": Between(lambda u, x: x * u.o.s, lambda u: setattr(u.o, "s", 0.5), lambda u: setattr(u.o, "s", 1.5)),
    "hook": Between(lambda u, x: x, hooked, lambda u: u.hook.remove()),
    "global": Between(lambda u, x: x + COUNT[0], lambda u: COUNT.__setitem__(0, 5), lambda u: COUNT.__setitem__(0, 0)),
    "context": Between(lambda u, x: x + VAR.get(), lambda u: VAR.set(5), lambda u: VAR.set(0)),
    "kernels": Between(
        lambda u, x: x * (1 + torch.get_num_threads() + torch.backends.cudnn.deterministic),
        lambda u: (torch.set_num_threads(3), setattr(torch.backends.cudnn, "deterministic", True)),
        lambda u: (torch.set_num_threads(1), setattr(torch.backends.cudnn, "deterministic", False)),
    ),
    "gradients off": Between(lambda u, x: x, lambda u: u.a.requires_grad_(False), lambda u: u.a.requires_grad_()),
}


@pytest.mark.slow
@each_choice
@pytest.mark.parametrize("name", BETWEEN)
def test_between_forward_and_backward(name, choice):
    case = BETWEEN[name]

    def run(model: Stages) -> dict[str, Tensor]:
        torch.manual_seed(1)
        for _ in range(4):
            loss = model(torch.randn(4, D, D)).pow(2).mean()
            for layer in model.layers:
                case.change(layer)
            loss.backward()
            for layer in model.layers:
                case.back(layer)
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def make() -> Stages:
        torch.manual_seed(0)
        return Stages(lambda unit: unit.__dict__.update(s=1.5, o=SimpleNamespace(s=1.5)), case.use)

    wanted, model = run(make()), make()
    with attach(model, {"layers.0": choice, "layers.1": choice}):
        assert_equal(run(model), wanted)


@each_choice
@pytest.mark.parametrize("write", [lambda p: p.data.add_(1), lambda p: setattr(p, "data", p.data + 1)])
def test_a_weight_written_unseen_before_backward_is_an_error(write, choice):
    model = Stages(lambda unit: None, lambda unit, x: x)
    with attach(model, {"layers.0": choice, "layers.1": choice}):
        loss = model(torch.randn(4, D, D)).sum()
        write(model.layers[1].a.bias)  # type: ignore[union-attr]
        with pytest.raises(InPlaceError, match=r"layers\.1\.a\.bias was changed in place between"):
            loss.backward()


@each_choice
def test_an_object_that_carries_the_hidden_state(choice):
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.layers = nn.Linear(D, D), nn.ModuleList(Carried() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            flow = Flow(self.enter(x))
            for layer in self.layers:
                flow = layer(flow)
            return flow.h * flow.n

    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, flow: Flow) -> Flow:
            flow.n += 1
            flow.h = self.b(torch.tanh(self.a(flow.h)) * flow.n)
            return flow

    assert_equal(trained(Carrying, choice), trained(Carrying))


def test_one_element_written_unseen_anywhere_in_a_large_weight_is_seen():
    weight = nn.Parameter(torch.zeros(300, 700))
    taken = TENSORS.take(weight, close=True)
    assert TENSORS.unchanged(weight, taken)
    weight.data.view(-1)[123_457] = 1.0
    assert weight._version == taken.version and not TENSORS.unchanged(weight, taken)
