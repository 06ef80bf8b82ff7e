"""Markdown tables of the programs."""

from collections.abc import Iterable, Sequence
from typing import Any


def row(cells: Iterable[Any]) -> str:
    """One line; for programs that print each when they know it."""
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def head(names: Sequence[str]) -> str:
    """The names of columns, and the line below them."""
    return f"{row(names)}\n|{'---|' * len(names)}"


def table(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    return "\n".join([head(names), *map(row, rows)])
