"""Changes to the Python process that end with a block: attributes, garbage collection, signal handlers; and safe forks.

They know nothing of autockpt, so every package may use them.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

_ROOM = 1 << 17  # words: with frames as large as this one a chunk has a MiB to spare


def with_room(function: Callable[[], Result]) -> Result:
    """Call ``function`` where the interpreter frames of all its calls lie side by side; return its result.

    CPython keeps frames in chunks of 16 KiB, and maps a new one from the system whenever a call goes past the end of
    the last, only to unmap it when that call returns. A loop which happens to run at such a depth spends more time in
    this than in its work: 9 instead of 0.03 microseconds a call (CPython 3.11, ``push_chunk`` in Python/pystate.c).
    The frame of this function asks for so much that its chunk has room for thousands of others, and touches none of it.
    """
    return function()


with_room.__code__ = with_room.__code__.replace(co_stacksize=_ROOM)


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of ``target`` another value for the block. An attribute that was missing is None afterwards."""
    before = getattr(target, name, None)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


# CPython 3.12, and no other version, puts objects that never die aside in each collection: 375 with all of PyTorch and
# transformers imported. A program that freezes its own objects freezes hundreds of thousands.
_NEVER_DIE = 5_000


def has_frozen_objects() -> bool:
    """Whether this process keeps objects of its own frozen (``gc.freeze``)."""
    return gc.get_freeze_count() > _NEVER_DIE


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection for the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install signal handlers for the block. Does nothing outside the main thread, which alone receives signals."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_deferred(numbers: Iterable[signal.Signals]) -> Iterator[list[signal.Signals]]:
    """Defer signals until the end of the block, and yield the list of those that arrived so far.

    A handler that was installed outside of Python cannot be restored, so such a signal is not deferred.
    """
    came: list[signal.Signals] = []
    ours = [number for number in numbers if signal.getsignal(number) is not None]
    try:
        with signal_handlers(dict.fromkeys(ours, lambda number, frame: came.append(signal.Signals(number)))):
            yield came
    finally:
        for number in came:
            signal.raise_signal(number)


def fork() -> int:
    """``os.fork``, where a Ctrl-C or SIGTERM that comes meanwhile is handled right afterwards, in the parent alone.

    Python runs hooks before it returns from a fork, and drops what a handler raises in one: the signal would be lost.
    """
    with signals_deferred((signal.SIGINT, signal.SIGTERM)) as came:
        pid = os.fork()
        if not pid:
            came.clear()
    return pid
