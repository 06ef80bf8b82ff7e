"""Iterators: how far they are, told without advancing them, and putting them back where that can be."""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import operator
import re
import sys
import types
from array import array
from collections import deque
from typing import Any

from autockpt.policies.rerun_state.tensors import Kind, NotPutBackError, State, same

_PATTERN: Any = re.compile("")
_SEQUENCES = {type(iter(kind)) for kind in ([], (), "", "é", b"", bytearray(), array("i"))} | {type(reversed([]))}
_NUMBERED: Any = type("", (), {"__getitem__": len})()
_SEQUENCES.add(type(iter(_NUMBERED)))  # of whatever has elements by number, as arrays
_SMALL_RANGE = type(iter(range(0)))
_RANGES = (_SMALL_RANGE, type(iter(range(1 << 70))))
_COUNTED = {type(way(view)) for view in ({}.keys(), {}.values(), {}.items(), deque()) for way in (iter, reversed)}
_COUNTED.add(type(iter(set())))
_FORWARDS = (*(v for v in vars(itertools).values() if isinstance(v, type)), map, filter, zip, enumerate, reversed)
_FORWARDS += (type(iter(int, 1)),)  # of a function until it returns something: what that changes is its own
_FRAMES = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
ADVANCING = frozenset((*_SEQUENCES, *_RANGES, *_COUNTED, *_FORWARDS, *_FRAMES))


class Counts(Kind):
    """``itertools.count``: its next number, which CPython keeps behind the object's header; as an object beside it
    where the step is not 1."""

    def take(self, obj: Any, *, close: bool) -> Any:
        held, text = held_by(obj), repr(obj)[len("count(") : -1]  # the number as an object, and the step
        return held[0] if len(held) > 1 else None if text.startswith("<") else int(text)

    def unchanged(self, obj: Any, taken: Any) -> bool:
        return same(self.take(obj, close=False), taken)

    def put(self, obj: Any, taken: Any) -> None:
        now, as_object = self.take(obj, close=False), len(held_by(obj)) > 1
        words = (ctypes.c_ssize_t * 2).from_address(id(obj) + object.__basicsize__)
        if [*words] != [sys.maxsize, id(now)] if as_object else [*words] != [now, 0] or type(taken) is not int:
            raise NotPutBackError  # not where CPython keeps them, as of 3.13
        if as_object:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(taken))
            words[1] = id(taken)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(now))
        else:
            words[0] = taken


def held_by(iterator: Any) -> list[Any]:
    """The objects that an iterator refers to, less its class, which those of itertools hold from Python 3.12 on."""
    return [held for held in gc.get_referents(iterator) if held is not type(iterator)]


def position(iterator: Any) -> Any:
    """What tells that an iterator has advanced: what it holds, and how far the iterators in it are."""
    kind = type(iterator)
    frame = getattr(iterator, _FRAMES[kind]) if kind in _FRAMES else None  # first: it is itself something to refer to
    held = held_by(iterator)
    if kind is itertools.count:
        return Counts().take(iterator, close=False)
    if kind in _SEQUENCES or kind is reversed:
        return iterator.__reduce__()[2:]
    if kind in _RANGES:  # up to Python 3.11 the range and how far, later what is left of it
        return iterator.__reduce__()[1:]
    far = iterator.__length_hint__() if kind in _COUNTED else None
    if kind is itertools.cycle:  # it keeps what it goes over, what it saved of that, and how far in this it is
        far = (ctypes.c_ssize_t * 3).from_address(id(iterator) + object.__basicsize__)[2]
    deeper = [part for value in held for part in (value if type(value) is tuple else (value,))]
    inner = [position(value) for value in deeper if type(value) in ADVANCING]
    return [id(value) for value in (*held, *deeper)], frame and frame.f_lasti, far, inner


def memory_of(obj: Any) -> bytes:
    """What an object of C's own has behind its header: of an iterator how far it is, among other things."""
    header = object.__basicsize__
    return ctypes.string_at(id(obj) + header, type(obj).__basicsize__ - header)


def is_iterator_in_c(kind: type) -> bool:
    found = next((vars(owner)["__next__"] for owner in kind.__mro__ if "__next__" in vars(owner)), None)
    return type(found) is types.WrapperDescriptorType and not issubclass(kind, io.IOBase)


def _rewind(iterator: Any, taken: Any) -> None:
    if not taken or len(iterator.__reduce__()) < 3:  # at its end it has let go of what it went over
        raise NotPutBackError
    iterator.__setstate__(taken[0])


def _rewind_range(iterator: Any, taken: Any) -> None:
    (left,), far = taken
    if far is not None:
        iterator.__setstate__(far)
        return
    (now,), _ = position(iterator)
    words = (ctypes.c_long * 3).from_address(id(iterator) + object.__basicsize__)
    if type(iterator) is not _SMALL_RANGE or [*words] != [now.start, now.step, len(now)]:
        raise NotPutBackError  # not where CPython keeps them, as of 3.13
    words[:] = left.start, left.step, len(left)


IN_C = State(memory_of, None)
"""Iterators, and the like, of which nothing but their memory tells that they have advanced."""
ITERATORS: dict[type, Kind] = {
    **dict.fromkeys(ADVANCING, State(position, None)),
    **dict.fromkeys(_SEQUENCES, State(position, _rewind)),
    **dict.fromkeys(_RANGES, State(position, _rewind_range)),
    **dict.fromkeys((type(itertools.tee(())[0]), type(_PATTERN.scanner(""))), IN_C),
    itertools.count: Counts(),
    itertools.repeat: State(lambda r: operator.length_hint(r, -1), None),
}
"""Kinds of iterators of these very types."""
