"""Forks that do something which may kill them, and say what came of it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from autockpt.process import Child, close_inherited


def forked(work: Callable[[Callable[[Any], None]], object], *, leads: bool = False) -> Child:
    """A fork of this process, whose ``work`` is given what sends a message here.

    Nothing that it prints is seen but the traceback of what it raises. ``leads``: all that it starts ends with it.
    """

    def start(theirs: Connection) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        code = 1
        try:
            close_inherited()
            if leads:
                os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            work(theirs.send)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    return Child(start, leads=leads)


def how_it_ended(code: int | None) -> str:
    """``signal 9`` or ``exit 1``."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit {code}"
