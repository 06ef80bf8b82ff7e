"""Signals of the system, whose handlers run in the main thread alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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
