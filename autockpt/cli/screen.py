"""Where output goes: results to standard output, all else to standard error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def results() -> Console:
    """The console for results."""
    return _console(stderr=False)


def progress() -> Console:
    """The console for progress, notes and errors."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    """Colour only on terminals and without NO_COLOR; pipes and files get 120 columns unless COLUMNS says otherwise."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = 120
    return console


def print_json(text: str) -> None:
    """Print JSON to standard output, without colour or wrapping."""
    print(text, flush=True)
