"""Kinds of things that can change and stay the same object: what is in one now, whether it changed, putting that back.

Everything goes by the types' own functions: properties, ``__getattr__``, ``__eq__`` or ``__iter__`` of a user's class
never run, and no iterator advances. So what copies is given no object of a subclass, whose methods it might call, but
an iterator of the base; and a class is asked for by ``type``, as ``isinstance`` asks for ``__class__``, too.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import operator
import pickle
import queue
import random
import re
import sys
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autockpt.policies.attachment import AttachedForward
from autockpt.policies.rerun_state.iterators import IN_C, ITERATORS, is_iterator_in_c, memory_of
from autockpt.policies.rerun_state.tensors import COPIED_BYTES, PLAIN, TENSORS, Kind, NotPutBackError, State, same

Way = Callable[..., Any]
ABSENT = object()
_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


class Names(Kind):
    """Names of a namespace, or some of them: slots of an object, globals, closure cells. ``names`` of None: those of a
    class, whichever it has."""

    def __init__(self, names: tuple[str, ...] | None, get: Way, put: Way, drop: Way) -> None:
        self._names, self._get, self._put, self._drop = names, get, put, drop

    def take(self, obj: Any, *, close: bool) -> Any:
        if self._names is None:
            return {key: value for key, value in vars(obj).items() if not (key[:2] == "__" == key[-2:])}
        return {name: self._get(obj, name) for name in self._names}

    def unchanged(self, obj: Any, taken: Any) -> bool:
        return not self._differing(self.take(obj, close=False), taken)

    def _differing(self, now: Any, taken: Any) -> list[Any]:
        both = [*taken, *(key for key in now if key not in taken)]
        return [key for key in both if not same(now.get(key, ABSENT), taken.get(key, ABSENT))]

    def put(self, obj: Any, taken: Any) -> None:
        for key in self._differing(self.take(obj, close=False), taken):
            value = taken.get(key, ABSENT)
            self._drop(obj, key) if value is ABSENT else self._put(obj, key, value)

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        return [(f".{name}", value) for name, value in taken.items()]


class Fields(Names):
    """A dictionary: of an object's attributes, or for itself. Module attributes of ``hidden`` names are left alone.
    ``ordered``: in which order its keys stand counts."""

    def __init__(self, hidden: frozenset[str] = frozenset(), form: str = ".{}", *, ordered: bool = False) -> None:
        super().__init__(None, dict.get, _set_item, _delete_item)
        self.hidden, self._form, self.ordered = hidden, form, ordered

    def keys(self, obj: Any) -> Any:
        """A view of them, in their order."""
        return _base_of(obj).keys(obj)

    def take(self, obj: Any, *, close: bool) -> Any:
        return dict.copy(obj) if type(obj) is dict else dict(_base_of(obj).items(obj))

    def unchanged(self, obj: Any, taken: Any) -> bool:
        now = self.take(obj, close=False)
        alike = len(now) == len(taken) and all(map(operator.is_, now, taken))
        if alike and all(map(operator.is_, now.values(), taken.values())):
            return True
        return (alike or not self.ordered) and not self._differing(now, taken)

    def _differing(self, now: Any, taken: Any) -> list[Any]:
        return [key for key in super()._differing(now, taken) if key not in self.hidden]

    def put(self, obj: Any, taken: Any) -> None:
        now = [*self.keys(obj)]
        if self.ordered and not (len(now) >= len(taken) and all(map(operator.is_, now, taken))):
            _base_of(obj).clear(obj)
        super().put(obj, taken)

    def size(self, obj: Any) -> int:
        return dict.__len__(obj)

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        shown = [(key, value) for key, value in taken.items() if key not in self.hidden]
        named = [(self._form.format(key if type(key) is str else "…"), value) for key, value in shown]
        # tensors as keys, as of an optimizer's state, are there for which they are
        keys = (key for key in taken if type(key) not in PLAIN and not issubclass(type(key), torch.Tensor))
        return named + [("[a key]", key) for key in keys]


def _of_this_thread(local: threading.local) -> dict[str, Any]:
    return threading.local.__getattribute__(local, "__dict__")


class OfThreads(Names):
    """What a ``threading.local`` holds in the thread that asks. Backward may run in another than forward did, as that
    of a device does, and finds there what forward had found in its own."""

    def __init__(self) -> None:
        of = _of_this_thread
        super().__init__(None, getattr, lambda o, k, v: of(o).__setitem__(k, v), lambda o, k: of(o).__delitem__(k))

    def take(self, obj: Any, *, close: bool) -> Any:
        return dict.copy(_of_this_thread(obj))


class OfModules(Fields):
    """A module's attributes. Choices come and go as its ``forward``."""

    def _differing(self, now: Any, taken: Any) -> list[Any]:
        found = super()._differing(now, taken)
        if "forward" in found and AttachedForward in (type(now.get("forward")), type(taken.get("forward"))):
            found.remove("forward")
        return found


class Parameters(Fields):
    """A module's own parameters. Where FSDP and accelerate exchange them for the same values they are left alone."""

    def _differing(self, now: Any, taken: Any) -> list[Any]:
        found = super()._differing(now, taken)
        both = [p for key in found for p in (now.get(key), taken.get(key))]
        return [] if any(hasattr(p, "to_local") or getattr(p, "is_meta", False) for p in both) else found


class Elements(Kind):
    """A list or deque, without what a subclass adds."""

    def __init__(self, kind: type) -> None:
        self._kind: Any = kind

    def take(self, obj: Any, *, close: bool) -> Any:
        return self._kind(self._kind.__iter__(obj))

    def unchanged(self, obj: Any, taken: Any) -> bool:
        now = self.take(obj, close=False)
        return len(now) == len(taken) and all(map(same, now, taken))

    def put(self, obj: Any, taken: Any) -> None:
        self._kind.clear(obj)
        self._kind.extend(obj, taken)

    def size(self, obj: Any) -> int:
        return self._kind.__len__(obj)

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        return [(f"[{i}]", value) for i, value in enumerate(taken)]


class Sets(Elements):
    """A set: its elements in their order, as code that goes through it may depend on that, and a copy. All goes by the
    tables of sets, so that no element is hashed anew."""

    def __init__(self) -> None:
        super().__init__(set)

    def take(self, obj: Any, *, close: bool) -> Any:
        return [*set.__iter__(obj)], set.union(set(), obj)

    def unchanged(self, obj: Any, taken: Any) -> bool:
        order, _ = taken
        now = [*set.__iter__(obj)]
        return len(now) == len(order) and all(map(operator.is_, now, order))

    def put(self, obj: Any, taken: Any) -> None:
        _, was = taken
        now = set.union(set(), obj)
        # what stays keeps its place, which depends on what was there when it came
        set.difference_update(obj, set.difference(now, was))
        set.update(obj, set.difference(was, now))
        if self.unchanged(obj, taken):
            return
        set.clear(obj)
        set.update(obj, was)
        if not self.unchanged(obj, taken):
            raise NotPutBackError

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        order, _ = taken
        return super().parts(order)


class Arrays(Kind):
    """NumPy arrays."""

    def take(self, obj: Any, *, close: bool) -> Any:
        plain = _plain(obj)
        return plain.copy() if plain.nbytes <= COPIED_BYTES else None

    def unchanged(self, obj: Any, taken: Any) -> bool:
        if taken is None:
            return True
        now = _plain(obj)
        alike = now.dtype == taken.dtype and now.shape == taken.shape
        return alike and now.tobytes() == taken.tobytes()  # of objects: which they are

    def put(self, obj: Any, taken: Any) -> None:
        now = _plain(obj)
        if taken is None or now.shape != taken.shape or now.dtype != taken.dtype or not now.flags.writeable:
            raise NotPutBackError
        sys.modules["numpy"].copyto(now, taken)

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        return [("[…]", value) for value in taken.flat] if taken is not None and taken.dtype.hasobject else ()


def _plain(array: Any) -> Any:
    """The same memory without what a subclass adds."""
    return sys.modules["numpy"].ndarray.__array__(array)


def _base_of(fields: Any) -> Any:
    """The class whose methods know all of a dictionary and nothing of what a subclass adds."""
    return OrderedDict if issubclass(type(fields), OrderedDict) else dict


def _set_item(fields: Any, key: Any, value: Any) -> None:
    _base_of(fields).__setitem__(fields, key, value)


def _delete_item(fields: Any, key: Any) -> None:
    _base_of(fields).__delitem__(fields, key)


def _tell(file: Any) -> Any:
    try:
        return None if file.isatty() else file.tell()
    except (OSError, ValueError):
        return None


def _bytes(memory: Any) -> bytes | None:
    """What stands in memory that is handed out as such; None where that is much, closed or let go of."""
    try:
        with memoryview(memory) as view:
            return view.tobytes() if view.nbytes <= COPIED_BYTES else None
    except (ValueError, BufferError):
        return None


def _set_bytes(memory: Any, taken: bytes | None) -> None:
    if taken is None or taken == _bytes(memory):
        return
    if not issubclass(type(memory), _C_DATA):
        with memoryview(memory) as view:
            view.cast("B")[:] = taken
        return
    form = re.sub(":[^:]*:", "", memoryview(memory).format)  # without the names of fields
    if not _POINTERS.isdisjoint(form):  # the objects that they point to may be gone
        raise NotPutBackError
    ctypes.memmove(ctypes.addressof(memory), taken, len(taken))


def _set_torch(generator: torch.Generator, taken: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(taken), dtype=torch.uint8))


FIELDS, DICT, PARAMETERS = Fields(), Fields(form="[{!r}]", ordered=True), Parameters(form="[{!r}]")
OF_THREADS = OfThreads()
BY_TYPE: dict[type, Kind] = {
    **ITERATORS,
    **dict.fromkeys(_FILES, State(_tell, None)),
    **dict.fromkeys((io.StringIO, io.BytesIO), State(lambda f: f.__getstate__(), lambda f, was: f.__setstate__(was))),
    bytearray: State(bytes, lambda b, taken: bytearray.__setitem__(b, slice(None), taken)),
    array: State(array.__copy__, lambda a, taken: array.__setitem__(a, slice(None), taken)),
    queue.SimpleQueue: State(queue.SimpleQueue.qsize, None),
    torch.Generator: State(lambda g: bytes(g.get_state().numpy()), _set_torch),
}
"""Kinds of these very types; those of subclasses: ``kind_of``."""
_C_DATA: Any = ctypes.Structure.__mro__[1]
_POINTERS = frozenset("&OPXZz")
_OF_ERRORS: Any = vars(BaseException)
_ERROR = Names(
    ("args", "__cause__"),
    lambda error, name: _OF_ERRORS[name].__get__(error),
    lambda error, name, value: _OF_ERRORS[name].__set__(error, value),
    object.__delattr__,
)


def _take_bits(bits: Any) -> tuple[bytes, int]:
    return pickle.dumps(bits.state), getattr(bits.seed_seq, "n_children_spawned", 0)


def _put_bits(bits: Any, taken: tuple[bytes, int]) -> None:
    state, spawned = taken
    if spawned != _take_bits(bits)[1]:  # which cannot be taken back
        raise NotPutBackError
    bits.state = pickle.loads(state)


_NUMPY_BITS = State(_take_bits, _put_bits)
_NUMPY_GENERATOR = State(
    lambda g: _NUMPY_BITS.take(g.bit_generator, close=False), lambda g, s: _NUMPY_BITS.put(g.bit_generator, s)
)
_BY_BASE: tuple[tuple[Any, Kind | None], ...] = (
    (torch.Tensor, TENSORS),
    (dict, DICT),
    *((kind, Elements(kind)) for kind in (list, deque)),
    (set, Sets()),
    ((memoryview, mmap.mmap, _C_DATA), State(_bytes, _set_bytes)),
    (BaseException, _ERROR),
    (random.SystemRandom, None),
    (random.Random, State(random.Random.getstate, random.Random.setstate)),
)


def _index(iterator: Any) -> tuple[bytes, int | None]:
    """Whether ``nditer`` has begun, and the index, which lies elsewhere."""
    try:
        return memory_of(iterator), iterator.iterindex
    except ValueError:  # closed
        return b"", None


@functools.cache
def _of_numpy(numpy: Any) -> tuple[tuple[Any, Kind], ...]:
    old: Any = numpy.random.RandomState
    return (
        (numpy.ndarray, Arrays()),
        (numpy.void, State(lambda record: record.tobytes(), None)),
        (numpy.nditer, State(_index, None)),
        (old, State(lambda r: pickle.dumps(old.get_state(r, False)), lambda r, s: old.set_state(r, pickle.loads(s)))),
        (numpy.random.BitGenerator, _NUMPY_BITS),
        (numpy.random.SeedSequence, State(lambda s: s.n_children_spawned, None)),
        (numpy.random.Generator, _NUMPY_GENERATOR),
    )


def kind_of(value: Any) -> Kind | None:
    """How what is in a value can change, beside its attributes; None where it cannot."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    for base, how in _BY_BASE if numpy is None else (*_BY_BASE, *_of_numpy(numpy)):
        if issubclass(kind, base):
            return how
    return IN_C if is_iterator_in_c(kind) else None
