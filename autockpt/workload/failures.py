"""Errors of the user's code as one line that names its file and line."""

from __future__ import annotations

import os
import re
import site
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from autockpt.errors import AutockptError, UsageError, WorkloadError

LONGEST = 240  # characters of a message
_OURS = str(Path(__file__).resolve().parents[1])
_PYTHONS = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple({os.path.realpath(folder) + os.sep for folder in (*_PYTHONS, *site.getsitepackages(), _OURS)})


@contextmanager
def needed(what: str, remedy: str) -> Iterator[None]:
    """Imports inside may fail: then UsageError says ``what`` is missing."""
    try:
        yield
    except ImportError:
        raise UsageError(what, remedy=remedy) from None


def workload_error(error: BaseException, what: str, *, remedy: str = "") -> AutockptError:
    """A WorkloadError that says what failed, where in the user's own code, and with which message.

    Errors that already are for people come back as they are.
    """
    if isinstance(error, AutockptError):
        return error
    place = location(error)
    message = summary(error)
    if isinstance(error, SystemExit):
        message = f"it called sys.exit({error.code!r})"
    return WorkloadError(
        f"{what} failed{f' at {place}' if place else ''}: {message}",
        remedy=remedy or "Correct it there; autockpt only ran it.",
    )


def step_failed(error: BaseException, what: str) -> AutockptError:
    """The same for a training step: where no code of the user's took part, its model does not take its batch."""
    refused = (
        "The model does not take such a batch. Try other sizes, or bring a batch of your own: a function that returns "
        "(model, batch), or autockpt.Step(model, batch). A loss of your own is called as loss(model, batch)."
    )
    if isinstance(error, TypeError) and "'closure'" in str(error):
        several = (
            "An optimizer such as LBFGS, which calls a closure, runs forward and backward several times in a step. "
            "Search with another over the same weights (torch.optim.SGD): activations of its passes are the same."
        )
        return workload_error(error, what, remedy=several)
    return workload_error(error, what, remedy="" if location(error) else refused)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which is an answer about the device rather than a fault in anyone's code."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def location(error: BaseException) -> str | None:
    """``train.py:42``: the innermost place in the user's own code that an exception passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{_short(frame.filename)}:{frame.lineno}" for frame in frames if _is_own(frame.filename)), None)


def crash_site(log: str) -> str:
    """The same place in what faulthandler wrote of a process that crashed; empty where it did not."""
    frames = re.findall(r'^ *File "([^"]+)", line (\d+) in ', log, re.M)  # the innermost comes first
    return next((f"{_short(file)}:{line}" for file, line in frames if _is_own(file)), "")


def _is_own(file: str) -> bool:
    """Whether it is of the user's own code, neither a library's nor ours."""
    real = os.path.realpath(file)
    return os.path.exists(real) and not real.startswith(_LIBRARIES)


def summary(error: BaseException) -> str:
    """The exception's class and message on one line, shortened."""
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(filename: str) -> str:
    """Relative to the working directory where the file lies below it."""
    try:
        relative = os.path.relpath(filename)
    except ValueError:
        return filename
    return filename if relative.startswith("..") else relative
