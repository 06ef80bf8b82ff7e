"""What leaves a verb: a result or one screen of explanation with an exit code, never a traceback."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from autockpt.cli import screen
from autockpt.errors import AutockptError, InfeasibleError

INTERRUPTED = 130
FAILED = 4


def guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb so that every exception becomes a message and an exit code; with ``--json`` also JSON.

    AUTOCKPT_DEBUG=1 in the environment shows tracebacks.
    """

    @functools.wraps(verb)
    def run(**options: Any) -> None:
        as_json = bool(options.get("as_json"))
        interrupts: list[int] = []
        try:
            with _noting(interrupts):
                verb(**options)
        except typer.Exit:
            raise
        except AutockptError as error:
            raise typer.Exit(_explain(error, as_json)) from None
        except KeyboardInterrupt:
            raise typer.Exit(_interrupted(as_json)) from None
        except BrokenPipeError:
            # whoever read our output has gone; point it elsewhere so that the interpreter's last flush is silent
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            # what an interrupt leaves half done (an import, above all) may fail in ways of its own
            code = _interrupted(as_json) if interrupts else _bug(error, as_json)
            raise typer.Exit(code) from None

    return run


@contextmanager
def _noting(interrupts: list[int]) -> Iterator[None]:
    """Write down each Ctrl-C of the block, which raises KeyboardInterrupt as ever: code may turn that into another."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(as_json: bool) -> int:
    _debug()
    with _undisturbed():
        _say("interrupted", "What was measured so far is kept; the same command continues.", as_json, INTERRUPTED)
    return INTERRUPTED


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever presses Ctrl-C twice still gets the message."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _explain(error: AutockptError, as_json: bool) -> int:
    _debug()
    remedy = error.remedy
    more: dict[str, Any] = {}
    if isinstance(error, InfeasibleError) and error.smallest_peak is not None:
        from autockpt.schema.sizes import format_bytes

        more["smallest_peak_bytes"] = error.smallest_peak
        smallest = format_bytes(error.smallest_peak)
        if smallest not in error.message + remedy:
            remedy = f"The smallest peak that any plan reaches is {smallest}. {remedy}".strip()
    if isinstance(error, InfeasibleError) and error.ways:
        more["ways_out"] = [way.model_dump(mode="json") for way in error.ways]
    _say(error.message, remedy, as_json, error.exit_code, **more)
    return error.exit_code


def _bug(error: Exception, as_json: bool) -> int:
    _debug()
    name = f"autockpt-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        log = Path(tempfile.gettempdir()) / name
        log.write_text(f"{sys.argv}\n\n{''.join(traceback.format_exception(error))}")
        where = f"Details are in {log}; please report them."
    except OSError:
        where = "Run it again with AUTOCKPT_DEBUG=1 to see details; please report them."
    first = (str(error).splitlines() or [""])[0][:200]
    _say(f"unexpected {type(error).__name__}: {first}", f"This is a bug in autockpt. {where}", as_json, FAILED)
    return FAILED


def _debug() -> None:
    if os.environ.get("AUTOCKPT_DEBUG", "") not in ("", "0"):
        traceback.print_exc()


def _say(message: str, remedy: str, as_json: bool, code: int, **more: Any) -> None:
    from rich.text import Text

    console = screen.progress()
    console.print(Text.assemble(("autockpt: ", "bold red"), message))
    for line in remedy.splitlines():
        indented = textwrap.fill(line, console.width - 1, initial_indent="  ", subsequent_indent="  ")
        console.print(Text(indented), soft_wrap=True)
    if as_json:
        screen.print_json(json.dumps({"error": message, "remedy": remedy, "exit_code": code} | more, indent=2))
