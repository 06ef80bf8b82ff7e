"""One look for all tables: light, readable without colour, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# a rule under the heading and nothing else, so that what is printed can be cut and pasted
RULE = Box("    \n    \n ── \n    \n    \n ── \n    \n    \n")
_ANY_WIDTH = 10_000
# what a verdict is called, and its colour
VERDICTS = {
    "fits": ("yes", "green"),
    "over_budget": ("no", "red"),
    "out_of_memory": ("OOM", "red"),
    "simulated": ("~yes", ""),  # by its ghost run
    "not_measured": ("?", ""),
}


class _Table(Table):
    """A table of which nothing is lost on a narrow screen: what does not fit is broken into lines, never cut.

    Cells are text as it is, without markup.
    """

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:  # type: ignore[override]
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=_ANY_WIDTH)
        widths = [self._measure_column(console, unbounded, column) for column in self.columns]
        least = sum(w.maximum if c.no_wrap else w.minimum for w, c in zip(widths, self.columns, strict=True))
        if least + self._extra_width > options.max_width:
            for column in self.columns:
                column.no_wrap, column.overflow = False, "fold"
        yield from super().__rich_console__(console, options)


def plain_table(*columns: str, show_header: bool = True) -> Table:
    """An empty table in the project's look; two spaces between columns.

    A column is named by its heading: ``>peak`` is aligned right, and the text of ``<choices`` is broken into lines.
    """
    table = _Table(
        box=RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_header=show_header,
        caption_justify="left", caption_style="dim",
    )  # fmt: skip
    for column in columns:
        justify = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip("<>"), justify=justify, no_wrap=not column.startswith("<"), overflow="fold")
    return table


def heading(text: str, console: Console) -> None:
    """An empty line, and what the next ones are about."""
    console.print()
    console.print(Text(text, style="bold"))


def bullets(lines: Iterable[str], mark: str = "•") -> Table:
    """Paragraphs with a hanging indent."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(mark, Text(line))
    return grid
