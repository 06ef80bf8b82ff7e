"""Every verb ends with a result, or with an error message and an exit code, never with a traceback."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.text import Text

from autockpt.errors import AutockptError, InfeasibleError, without_passwords
from autockpt.interpreter import signal_handlers
from autockpt.process import own_rank
from autockpt.schema.sizes import format_bytes
from autockpt.terminal import console

Answer = TypeVar("Answer")
INTERRUPTED, UNREAD, TERMINATED = 130, 141, 143
FAILED = 4
CONTINUED = ("search",)  # verbs that continue where they were interrupted


def guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb so that every exception becomes a message and an exit code; with ``--json`` also JSON.

    AUTOCKPT_DEBUG=1 in the environment shows tracebacks.
    """

    @functools.wraps(verb)
    def run(**options: Any) -> None:
        as_json, kept = bool(options.get("as_json")), verb.__name__ in CONTINUED
        interrupts: list[int] = []
        try:
            with _noting(interrupts):
                verb(**options)
        except typer.Exit as end:
            if end.exit_code == INTERRUPTED:
                raise typer.Exit(_code(interrupts)) from None
            raise
        except AutockptError as error:
            raise typer.Exit(_explain(error, as_json)) from None
        except BrokenPipeError:  # the reader of our output is gone
            silence_output()
            raise typer.Exit(UNREAD) from None
        except (KeyboardInterrupt, Exception) as error:
            # what an interrupt leaves half done, such as an import, may fail in any way
            if interrupts or isinstance(error, KeyboardInterrupt):
                code = _interrupted(as_json, _code(interrupts), kept)
            elif isinstance(error, OSError) and error.errno in _UNWRITTEN and error.filename is None:
                silence_output()
                code = _fail(
                    f"the answer could not be written: {error.strerror}", _READ_IT * kept, False, FAILED, code="output"
                )
            else:
                code = _bug(error, as_json)
            raise typer.Exit(code) from None

    return run


def silence_output() -> None:
    """Point standard output elsewhere, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _noting(interrupts: list[int]) -> Iterator[None]:
    """Record each Ctrl-C and SIGTERM of the block. Both raise KeyboardInterrupt, which code may turn into another
    error.

    Signals that already have another handler, or are ignored, are not touched.
    """

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    with signal_handlers({number: note for number, handler in usual.items() if signal.getsignal(number) is handler}):
        yield


def _code(interrupts: list[int]) -> int:
    """The exit code after an interrupt, as a shell gives it."""
    return TERMINATED if signal.SIGTERM in interrupts else INTERRUPTED


_UNWRITTEN = (errno.ENOSPC, errno.EIO, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_READ_IT = "It is in the run's directory: the same command shows it at once, without measuring again."
_KEPT = "What was measured so far is kept; the same command continues."
_AGAIN = "The same command begins again."


def _interrupted(as_json: bool, code: int, kept: bool) -> int:
    # a second Ctrl-C does not lose the message
    with signal_handlers({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        message = "ended by SIGTERM" if code == TERMINATED else "interrupted"
        return _fail(message, _KEPT if kept else _AGAIN, as_json, code)


def _explain(error: AutockptError, as_json: bool) -> int:
    remedy, more = error.remedy, dict[str, Any]()
    if isinstance(error, InfeasibleError) and error.smallest_peak is not None:
        more["smallest_peak_bytes"] = error.smallest_peak
        smallest = format_bytes(error.smallest_peak)
        if smallest not in error.message + remedy:
            remedy = f"The smallest peak that any plan reaches is {smallest}. {remedy}".strip()
    if isinstance(error, InfeasibleError) and error.alternatives:
        more["alternatives"] = error.alternatives
    return _fail(error.message, remedy, as_json, error.exit_code, code=error.code, **more)


def _bug(error: Exception, as_json: bool) -> int:
    name = f"autockpt-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        log = Path(tempfile.gettempdir()) / name
        log.write_text(without_passwords(f"{sys.argv}\n\n{''.join(traceback.format_exception(error))}"))
        where = f"Details are in {log}; please report them."
    except OSError:
        where = "Run it again with AUTOCKPT_DEBUG=1 to see details; please report them."
    first = without_passwords((str(error).splitlines() or [""])[0])[:200]
    message = f"unexpected {type(error).__name__}: {first}"
    return _fail(message, f"This is a bug in autockpt. {where}", as_json, FAILED, code="bug")


def _fail(message: str, remedy: str, as_json: bool, exit_code: int, *, code: str = "", **more: Any) -> int:
    """Show the error that is being handled; gives its exit code."""
    if os.environ.get("AUTOCKPT_DEBUG", "") not in ("", "0"):
        print(without_passwords(traceback.format_exc()), end="", file=sys.stderr)
    out = progress() if code != "bug" else console(stderr=True)
    with suppress(BrokenPipeError):  # no reader is left; the exit code stays
        out.print(Text.assemble(("autockpt: ", "bold red"), message, (f" [{code}]" if code else "", "dim")))
        for line in remedy.splitlines():
            indented = textwrap.fill(line, out.width - 1, initial_indent="  ", subsequent_indent="  ")
            out.print(Text(indented), soft_wrap=True)
    if as_json:
        report = {"error": message, "code": code, "remedy": remedy, "exit_code": exit_code}
        try:
            print_json(report | more)
        except OSError:  # it was printed above
            silence_output()
    return exit_code


def results() -> Console:
    """The console for results."""
    return console(stderr=False)


def progress() -> Console:
    """The console for progress, notes and errors: of the ranks of a job only the first has one."""
    return console(stderr=True) if own_rank() == 0 else Console(quiet=True)


def show(answer: Answer, printer: Callable[[Answer, Console], None], as_json: bool) -> None:
    """A verb's answer on standard output: as ``printer`` draws it, or as JSON."""
    if as_json:
        print_json(answer)
    else:
        printer(answer, results())


def print_json(answer: Any) -> None:
    """Print data as JSON to standard output, without colour or wrapping."""
    print(to_json(answer, indent=2, inf_nan_mode="null").decode(), flush=True)
