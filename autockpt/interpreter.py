"""What is done to the Python interpreter itself: room for its frames, its garbage collector, signals and forks."""

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
    """What ``function`` returns, called where the frames of all that it calls lie side by side.

    CPython keeps frames in chunks of 16 KiB, and maps a new one from the system whenever a call goes past the end of
    the last, only to unmap it when that call returns. A loop which happens to run at such a depth spends more time in
    this than in its work: 9 instead of 0.03 microseconds a call (CPython 3.11, ``push_chunk`` in Python/pystate.c).
    The frame of this function asks for so much that its chunk has room for thousands of others, and touches none of it.
    """
    return function()


with_room.__code__ = with_room.__code__.replace(co_stacksize=_ROOM)


# CPython 3.12, and no other version, puts objects that never die aside in each collection: 375 with all of PyTorch and
# transformers imported. Who freezes what lives on freezes hundreds of thousands.
_NEVER_DIE = 5_000


def frozen() -> bool:
    """Whether somebody in this process keeps objects frozen (``gc.freeze``)."""
    return gc.get_freeze_count() > _NEVER_DIE


@contextmanager
def waiting() -> Iterator[bool]:
    """No collection within the block. Gives whether there is any without it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield enabled
    finally:
        if enabled:
            gc.enable()


@contextmanager
def handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Other handlers for signals within the block; only the main thread ever gets any."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_back(numbers: Iterable[signal.Signals]) -> Iterator[list[signal.Signals]]:
    """Signals that come within the block are in the list that it is given, and are handled after it.

    A handler that was installed outside of Python could not be put back, and is left alone.
    """
    came: list[signal.Signals] = []
    ours = [number for number in numbers if signal.getsignal(number) is not None]
    try:
        with handling(dict.fromkeys(ours, lambda number, frame: came.append(signal.Signals(number)))):
            yield came
    finally:
        for number in came:
            signal.raise_signal(number)


def fork() -> int:
    """``os.fork``, where a Ctrl-C or SIGTERM that comes meanwhile is handled right afterwards, in the parent alone.

    Python runs hooks before it returns from a fork, and drops what a handler raises in one: the signal would be lost.
    """
    with held_back((signal.SIGINT, signal.SIGTERM)) as came:
        pid = os.fork()
        if not pid:
            came.clear()
    return pid
