"""One look for all tables: light, readable without colour, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import Box
from rich.table import Table
from rich.text import Text

# a rule under the heading and nothing else, so that what is printed can be cut and pasted
RULE = Box("    \n    \n ── \n    \n    \n ── \n    \n    \n")
# what a verdict is called, and its colour
VERDICTS = {
    "fits": ("yes", "green"),
    "over_budget": ("no", "red"),
    "out_of_memory": ("OOM", "red"),
    "simulated": ("~yes", ""),  # by its ghost run
    "not_measured": ("?", ""),
}


def plain_table(**options: Any) -> Table:
    """An empty table in the project's look; two spaces between columns."""
    return Table(box=RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", **options)


def bullets(lines: Iterable[str], mark: str = "•") -> Table:
    """Paragraphs with a hanging indent."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(mark, Text(line))
    return grid
