"""Where output goes: results to standard output or a file, all else to standard error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from autockpt.schema import Data
from autockpt.terminal import console

Answer = TypeVar("Answer", bound=Data)


def results() -> Console:
    """The console for results."""
    return console(stderr=False)


def progress() -> Console:
    """The console for progress, notes and errors."""
    return console(stderr=True)


def show(answer: Answer, printer: Callable[[Answer, Console], None], as_json: bool) -> None:
    """A verb's answer on standard output: as ``printer`` draws it, or as JSON."""
    if as_json:
        print_json(answer.model_dump_json(indent=2))
    else:
        printer(answer, results())


def print_json(text: str) -> None:
    """Print JSON to standard output, without colour or wrapping."""
    print(text, flush=True)
