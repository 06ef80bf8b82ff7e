"""What can be reached from a unit: its modules' attributes, and on from there through objects of any class, closures,
and the globals and class attributes that code names.

Left alone are what ``libraries`` keep for themselves, but for an optimizer that forward steps, and other units of a
plan that are reached as children of a module around them.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import gc
import inspect
import re
import sys
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Container, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from autockpt.checkpointing.fingerprint import host_values
from autockpt.policies.attachment import attached_to
from autockpt.policies.base import setting
from autockpt.policies.rerun_state.code import OBSERVES, Code, may_do, names_of
from autockpt.policies.rerun_state.fields import HEAP, attributes, slots_named, slots_of
from autockpt.policies.rerun_state.iterators import ADVANCING, IN_C
from autockpt.policies.rerun_state.kinds import (
    ABSENT,
    FIELDS,
    OF_THREADS,
    PARAMETERS,
    Elements,
    Fields,
    Names,
    OfModules,
    kind_of,
)
from autockpt.policies.rerun_state.libraries import in_library, is_library, is_opaque
from autockpt.policies.rerun_state.structure import is_sharded, placed_before
from autockpt.policies.rerun_state.tensors import PLAIN_TENSORS, SMALL_BYTES, TENSORS, Kind

OBJECTS, DEPTH, SECONDS = 20_000, 24, 5.0
"""The most objects that are looked at from one unit, as many in one container, the most steps away, and for how long
on the processor. Of all beyond a warning says that it is not looked at; ``tensors`` has the bounds in bytes."""
_AT_A_TIME = 256
ARGUMENT = "the argument"
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
)
_STATE = ("training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
MODULE = OfModules(frozenset(vars(nn.Module())) - {*_STATE, *HOOKS})
_IN_MODULES = re.compile(r"\._modules\['[^']*'\]$")
_INSIDE = re.compile(r"\._(?:modules|buffers|parameters)\['([^']*)'\]")
_WRAPPERS = (types.MethodType, types.MappingProxyType, functools.partial, functools.cached_property)
_WRAPPERS += (staticmethod, classmethod, property, types.BuiltinMethodType, types.MethodWrapperType)
_WRAPPERS += (type(re.compile("").match),)  # methods of C's that know their class
_EMPTY = types.CellType()
_CLASS: Any = vars(object)["__class__"]


class Node(NamedTuple):
    """A thing that can change: how to get there, what it is, and what was ``taken`` from it. ``loose``: reached by way
    of something that is known to change."""

    name: str
    obj: Any
    kind: Kind
    taken: Any
    loose: bool = False

    def unchanged(self) -> bool | torch.Tensor:
        return self.kind.unchanged(self.obj, self.taken)


def changed_of(nodes: Sequence[Node]) -> list[Node]:
    """Those that are not as they were; whatever devices must be asked for that is read at once."""
    same = [node.unchanged() for node in nodes]
    truths = [truth for truth in same if isinstance(truth, torch.Tensor)]
    answers = iter(host_values(truths) if truths else ())
    known = [next(answers) if isinstance(truth, torch.Tensor) else truth for truth in same]
    return [node for node, truth in zip(nodes, known, strict=True) if not truth]


class Walk:
    """From roots on, in the order of distance.

    ``inside``: ids of the unit's modules. ``known``: ids of what need not be looked at. ``lively``: names of what
    changes. ``close``: look at everything closely, else at those alone, and where it is None also glance at small
    buffers. ``fixed``: what was looked at and was not reached by way of something that changes. ``functions``: their
    code, by name. ``passing``: names of weak references to activations.
    """

    def __init__(
        self, unit: str, inside: Set[int], known: Container[int], lively: Container[str], *, close: bool | None
    ) -> None:
        self._unit, self._inside, self._known, self._lively, self._close = unit, inside, known, lively, close
        self.seen: dict[int, Any] = {}
        self.fixed: dict[int, Any] = {}
        self.nodes: list[Node] = []
        self._homes: set[tuple[Any, ...]] = set()
        self.functions: list[tuple[str, types.CodeType]] = []
        self.passing: list[str] = []
        self._scopes: list[dict[str, Any]] = []  # of modules that are held
        self._open: deque[tuple[str, Any, int, bool]] = deque()
        self._optimizers: list[tuple[str, dict[str, Any]]] = []
        self._whole: set[int] = set()  # modules of what the unit has hold of by itself
        self._left: list[tuple[str, nn.Module, int, bool]] = []  # other units

    def run(self, roots: Iterable[tuple[str, Any]], found: Iterable[Node] = ()) -> list[Node]:
        """All that can change. ``found``: such things themselves."""
        self._open.extend((name, value, 0, False) for name, value in roots)
        for node in found:
            self._node(node.name, node.obj, node.kind, 0, node.loose)
        until = None
        while self._open:
            name, value, step, loose = self._open.popleft()
            if type(value) in _PLAIN or id(value) in self._known:
                continue
            if issubclass(type(value), nn.Module) and not _IN_MODULES.search(name):
                self._by_itself(value)
            if id(value) in self.seen:
                continue
            late = False
            if len(self.seen) % _AT_A_TIME == _AT_A_TIME - 1:  # the processor's time, as others may keep it busy
                now = time.thread_time()
                until = until or now + SECONDS
                late = now > until
            if len(self.seen) >= OBJECTS or step > DEPTH or late:
                _warn_of_more()
                break
            self.seen[id(value)] = value
            graph = issubclass(type(value), torch.Tensor) and not value.is_leaf
            if not graph and (not loose or issubclass(type(value), (nn.Module, types.FunctionType))):
                self.fixed[id(value)] = value
            self._look(name, value, step, loose)
        return self.nodes

    def from_unit(self, roots: Iterable[tuple[str, Any]]) -> Code:
        """From a unit's ``roots``; what its code may do. Where that is to take gradients, optimizers that were reached
        are its own: they are looked at as well."""
        self.run(roots)
        code = may_do(self.functions)
        if code.uses_gradients and self._optimizers:
            self.run(self._optimizers)
        return code

    def _node(self, name: str, obj: Any, kind: Kind, step: int, loose: bool) -> None:
        if id(obj) in self._known:
            return
        if isinstance(kind, (Fields, Elements)) and kind.size(obj) > OBJECTS:
            _warn_of_more()
            return
        lively = name in self._lively
        try:
            if kind is TENSORS and name == ARGUMENT and not lively:
                taken = TENSORS.take(obj, close=bool(self._close), most=SMALL_BYTES)
            elif kind is TENSORS and self._close is None and not lively:
                taken = TENSORS.glance(obj)
            else:
                taken = kind.take(obj, close=bool(self._close or lively))
        except RuntimeError:  # a tensor of inference mode has no version
            return
        self.nodes.append(Node(name, obj, kind, taken, loose))
        self._go(name, step, kind.parts(taken), loose or lively)

    def _go(self, name: str, step: int, parts: Iterable[tuple[str, Any]], loose: bool) -> None:
        self._open.extend((name + label, part, step + 1, loose) for label, part in parts)

    def _look(self, name: str, value: Any, step: int, loose: bool) -> None:
        """What can change in a value, and where it leads."""
        kind = type(value)
        if issubclass(kind, nn.Module):
            self._module(name, value, step, loose)
        elif issubclass(kind, types.ModuleType):
            self._held(value, step)
        elif issubclass(kind, type):
            self._class(name, value, step)
        elif kind is types.FunctionType:
            self._function(name, value, step)
        elif kind in _WRAPPERS or issubclass(kind, (tuple, frozenset)):
            parts = enumerate(gc.get_referents(value))
            self._go(name, step, ((f"[{i}]" if issubclass(kind, tuple) else "", part) for i, part in parts), loose)
            self._attributes(name, attributes(value), step, loose)
        elif issubclass(kind, threading.local):
            self._node(name, value, OF_THREADS, step, loose)
            self._class(name, kind, step)
        elif issubclass(kind, torch.jit.ScriptFunction):
            self.functions.append((name, _unread.__code__))
        elif kind is functools._lru_cache_wrapper:
            self._attributes(name, vars(value), step, loose)
            # without bounds a dictionary, else C's list, in which what is new cannot be put back
            bounded = value.cache_info().maxsize is not None
            kept = (part for part in gc.get_referents(value) if bounded or type(part) is dict)
            self._go(name, step, ((".cache", part) for part in kept), loose)
        elif kind is contextvars.ContextVar:
            self._go(name, step, [("", value.get(None))], loose)
        elif issubclass(kind, (weakref.ref, *weakref.ProxyTypes)):
            target = ctypes.py_object.from_address(id(value) + object.__basicsize__).value
            if not issubclass(type(target), torch.Tensor):
                self._go(name, step, [("", target)], loose)
            elif not target.is_leaf:
                self.passing.append(name)
        elif issubclass(kind, torch.Tensor):
            self._node(name, value, TENSORS, step, loose)
            if name != ARGUMENT and (kind in PLAIN_TENSORS or not is_library(kind)):  # others are libraries' own
                self._attributes(f"{name}.__dict__", attributes(value), step, loose)
        else:
            how = PARAMETERS if name.endswith("._parameters") and issubclass(kind, dict) else kind_of(value)
            if how is not None:
                self._node(name, value, how, step, loose)
            elif is_opaque(kind):
                if issubclass(kind, torch.optim.Optimizer):
                    self._optimizers.append((name, vars(value)))
                return
            if kind in ADVANCING or how is IN_C or issubclass(kind, ctypes._Pointer):
                self._go(name, step, (("", part) for part in gc.get_referents(value)), loose)
            else:
                self._object(name, value, step, loose)

    def _attributes(self, name: str, fields: dict[str, Any] | None, step: int, loose: bool) -> None:
        # by "ds_id" DeepSpeed notes where a parameter is at present
        if fields is not None and not dict.__contains__(fields, "ds_id"):
            self._node(name, fields, FIELDS, step, loose)

    def _object(self, name: str, value: Any, step: int, loose: bool) -> None:
        self._attributes(name, attributes(value), step, loose)
        if slots := tuple(slots_of(type(value))):
            self._node(name, value, slots_named(*slots), step, loose)
        if type(value).__flags__ & HEAP:
            self._node(f"{name}.__class__", value, TYPE, step, loose)

    def _by_itself(self, module: nn.Module) -> None:
        """The unit has hold of a module. All of it is looked at, other units in it included, but for one that has the
        unit itself as a part, as the whole model: what else is in that is not."""
        if id(module) in self._whole or id(module) in self._inside:
            return
        parts = _parts(module)
        self._whole |= parts if parts.isdisjoint(self._inside) else {id(module)}
        self._open.extend(left for left in self._left if id(left[1]) in self._whole)
        self._left = [left for left in self._left if id(left[1]) not in self._whole]

    def _is_elsewhere(self, module: nn.Module) -> bool:
        """Whether another unit, or a part that is attached for its sake, is none of the unit's business."""
        if id(module) in self._inside or id(module) in self._whole:
            return False
        attached = attached_to(module)
        return attached is not None and attached.state.unit not in ("", self._unit)

    def _module(self, name: str, module: nn.Module, step: int, loose: bool) -> None:
        fields, kind = vars(module), MODULE
        if is_sharded(module):
            tensors = {key for key, value in fields.items() if isinstance(value, torch.Tensor)}
            kind = OfModules(MODULE.hidden | tensors | {"_parameters"})
        elif self._is_elsewhere(module):
            del self.seen[id(module)]
            self.fixed.pop(id(module), None)
            self._left.append((name, module, step, loose))
            return
        self._node(name, fields, kind, step, False)
        if slots := tuple(slots_of(type(module))):
            self._node(name, module, slots_named(*slots), step, loose)
        if (code := _untold(module)) is not None:
            self.functions.append((name, code))
        self._go(f"{name}.forward", step, [("", placed_before(fields.get("forward")))], False)
        self._class(name, type(module), step)

    def _class(self, name: str, cls: type, step: int) -> None:
        for owner in (*type.mro(cls), *type.mro(type(cls))):
            if (
                in_library(owner.__module__)
                or id(owner) in self._known
                or (owner is not cls and id(owner) in self.seen)
            ):
                continue
            self.seen[id(owner)] = self.fixed[id(owner)] = owner
            # whatever operators, loops and blocks call; modules are made elsewhere
            made = ("__init__", "__new__") if issubclass(cls, nn.Module) else ()
            special = (key for key in vars(owner) if key.startswith("__") and key not in made)
            called = tuple(v for key in special if type(v := vars(owner)[key]) is types.FunctionType)
            self._node(f"{name}:{owner.__name__}", owner, CLASS, step, False)
            self._go(name, step, (("", function) for function in called), False)

    def _function(self, name: str, function: types.FunctionType, step: int) -> None:
        home = function.__globals__
        if in_library(home.get("__name__")):  # a decorator of a library's, above all, around somebody's own function
            held = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
            held += [part for value in held if type(value) is dict for part in value.values()]
            inner = (value for value in held if type(value) in (types.FunctionType, types.MethodType))
            self._go(name, step, (("", value) for value in inner), False)
            return
        self.functions.append((name, function.__code__))
        for cell in function.__closure__ or ():
            self._node(f"{name}:closure", cell, CELL, step, False)
        self._go(f"{name}:default", step, [("", function.__defaults__), ("", function.__kwdefaults__)], False)
        self._node(name, function.__dict__, FIELDS, step, False)
        for scope in (home, *self._scopes):
            self._names(scope, *names_of(function.__code__), step)

    def _held(self, module: types.ModuleType, step: int) -> None:
        """A module of somebody's own that is held, as by an attribute: of it that counts which code names."""
        if in_library(vars(module).get("__name__")):
            return
        self._scopes.append(vars(module))
        for _, code in self.functions:
            self._names(vars(module), *names_of(code), step)

    def _names(self, home: dict[str, Any], names: tuple[str, ...], made: tuple[str, ...], step: int) -> None:
        """Globals that code names, each by itself, as other code names others; those of a module that it names, too.
        ``made``: such as it may make."""
        for key in names:
            value = home.get(key, ABSENT)
            module = _imported(home, key) if value is ABSENT else value
            own = type(module) is types.ModuleType and not in_library(module.__name__)
            if own and (id(module), *names) not in self._homes:
                self._homes.add((id(module), *names))
                self._names(vars(module), names, made, step)
            library = issubclass(type(value), type) and in_library(value.__module__)
            if type(value) is types.ModuleType or library or (value is ABSENT and key not in made):
                continue
            if (id(home), key) not in self._homes:
                self._homes.add((id(home), key))
                self.nodes.append(Node(f"the global {key}", home, Global(key), {key: value}))
                if value is not ABSENT:
                    self._open.append((f"the global {key}", value, step + 1, False))


def _unread(tensor: torch.Tensor) -> torch.Tensor:
    """Stands for code that cannot be read: it may do whatever this does."""
    return tensor.data


def _untold(module: nn.Module) -> types.CodeType | None:
    """The forward of a library's module where it writes to buffers that tell nothing of it; of running statistics their
    number tells, where they are counted."""
    code = getattr(inspect.getattr_static(type(module), "forward"), "__code__", None)
    if code is None or OBSERVES in code.co_names:
        return code
    buffers = module._buffers
    untold = buffers.get("running_mean") is not None and buffers.get("num_batches_tracked") is None
    return code if untold and "batch_norm" in code.co_names else None


class _Known:
    codes: ClassVar[dict[int, Code] | None] = None


def code_of(unit: str, module: nn.Module) -> Code:
    """What the code of a unit's forward may do."""
    known = {} if _Known.codes is None else _Known.codes
    if id(module) not in known:
        walk = Walk(unit, {id(inner) for inner in module.modules()}, (), (), close=False)
        walk.run([("", module)])
        known[id(module)] = may_do(walk.functions)
    return known[id(module)]


def _imported(home: dict[str, Any], name: str) -> Any:
    """The module that code imports by this name where it runs, relative to its package, too."""
    package, found = str(home.get("__package__") or ""), sys.modules.get(name)
    while found is None and package:
        found, package = sys.modules.get(f"{package}.{name}"), package.rpartition(".")[0]
    return found


def _parts(module: nn.Module) -> set[int]:
    """The ids of a module and of all in it, without asking their ``modules()``, which may be somebody's own."""
    found, rest = dict[int, nn.Module](), [module]
    while rest:
        one = rest.pop()
        found[id(one)] = one
        if type(inner := vars(one).get("_modules")) is dict:
            rest += [part for part in inner.values() if part is not None and id(part) not in found]
    return {*found}


def code_known(known: dict[int, Code]) -> AbstractContextManager[None]:
    """Go by what is ``known`` of units' code in here, by id of the module, and add to it: for who runs the same model
    with choice after choice, and nobody changes it meanwhile."""
    return setting(_Known, "codes", known)


def _warn_of_more() -> None:
    warnings.warn(
        f"more than {OBJECTS} objects, or some more than {DEPTH} steps away or slow to reach, belong to the state of a "
        "unit of the plan: whether its forward changes the rest, or how, is not known",
        stacklevel=4,
    )


class Global(Names):
    """One name of a module."""

    def __init__(self, key: str) -> None:
        super().__init__((key,), lambda home, key: home.get(key, ABSENT), dict.__setitem__, dict.__delitem__)
        self.key = key


def said(unit: str, name: str) -> str:
    """How to call a thing in a message."""
    return name if name.startswith("the ") else unit + _INSIDE.sub(r".\1", name)


CELL = slots_named("cell_contents")
TYPE = Names(("",), lambda obj, _: type(obj), lambda obj, _, cls: _CLASS.__set__(obj, cls), object.__delattr__)
CLASS = Names(None, getattr, type.__setattr__, type.__delattr__)
