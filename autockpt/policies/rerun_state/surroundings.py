"""What a forward reads that belongs to the process: the random states of Python and NumPy, context variables, torch's
default type, and which attention kernels are allowed."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autockpt.errors import ConflictError

if TYPE_CHECKING:
    from autockpt.policies.rerun_state.state import Memory

_SWITCHES = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    # in which order they are tried: sdpa_kernel(..., set_priority=True)
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),  # type: ignore[attr-defined]
    (torch.get_default_dtype, torch.set_default_dtype),
)


class Surroundings:
    """A Watch. After the forward what it did not use is dropped."""

    def __init__(self, memory: Memory) -> None:
        numpy = sys.modules.get("numpy")
        self._memory, self._unread = memory, False
        self._python: tuple[Any, ...] | None = python_state()
        self._numpy_words = numpy_words() if numpy is not None else b""
        self._numpy: Any = numpy.random.get_state() if numpy is not None and memory.uses_numpy is not False else None
        self._switches = _switches()
        self._context = contextvars.copy_context()

    def after(self) -> None:
        if self._python == python_state():
            self._python = None
        if self._numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            used = now[2] != self._numpy[2] or bool((now[1] != self._numpy[1]).any()) or now[3:] != self._numpy[3:]
            self._memory.uses_numpy = used or bool(self._memory.uses_numpy)
            if not used:
                self._numpy = None
        elif self._numpy_words and self._numpy_words != numpy_words():
            self._memory.uses_numpy = self._unread = True
        self._numpy_words = b""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a copy of the context that the forward began in: what it sets is gone after it."""
        return self._context.copy().run(function, *args)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As before the forward, and afterwards as now.

        Raises ConflictError where the forward drew numbers from NumPy that nobody had read the state of.
        """
        if self._unread:
            raise ConflictError(
                f"{self._memory.unit} drew random numbers from NumPy for the first time, after steps without, so this "
                "once its forward cannot run again as it did",
                remedy="Run the step again: from now on NumPy's random state is kept for it.",
            )
        python = python_state() if self._python is not None else None
        numpy = sys.modules["numpy"].random if self._numpy is not None else None
        numpy_state = numpy.get_state() if numpy is not None else None
        switches = _switches()
        try:
            if self._python is not None:
                put_python(self._python)
            if numpy is not None:
                numpy.set_state(self._numpy)
            _switch(switches, self._switches)
            yield
        finally:
            if python is not None:
                put_python(python)
            if numpy is not None:
                numpy.set_state(numpy_state)
            _switch(_switches(), switches)


def python_state() -> tuple[Any, ...]:
    """The state that Python draws from, read twice per call of a unit: 625 machine words and the second of a pair of
    normal numbers where that is left. ``random.getstate`` makes 625 numbers of them, which takes 13 µs, and NumPy's
    48; these take 0.3, where the forward of a tiny layer takes 250."""
    words = _python_words()
    return random.getstate() if words is None else (words.tobytes(), random._inst.gauss_next)  # type: ignore[attr-defined]


def put_python(state: tuple[Any, ...]) -> None:
    """Make it the state that Python draws from."""
    if len(state) == 2:
        index, *numbers = memoryview(state[0]).cast("I")
        state = (3, (*numbers, index), state[1])
    random.setstate(state)


@functools.cache
def _python_words() -> memoryview | None:
    """Where CPython keeps the words, the index before the rest; None where they are not found there."""
    if sys.implementation.name != "cpython":
        return None
    words = _words_at(id(random._inst) + object.__basicsize__)  # type: ignore[attr-defined]
    *numbers, index = random.getstate()[1]
    return words if words.cast("I").tolist() == [index, *numbers] else None


def numpy_words() -> bytes:
    """NumPy's random state without its left-over normal number, as bytes; empty for generators without an address."""
    try:
        return _words_at(sys.modules["numpy"].random.mtrand._rand._bit_generator.ctypes.state_address).tobytes()
    except AttributeError:
        return b""


@functools.lru_cache(maxsize=4)
def _words_at(address: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * 625).from_address(address)).cast("B")


def _switches() -> list[Any]:
    return [read() for read, _ in _SWITCHES]


def _switch(now: list[Any], wanted: list[Any]) -> None:
    if now != wanted:
        for (_, put), value in zip(_SWITCHES, wanted, strict=True):
            put(value)
