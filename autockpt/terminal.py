"""One look for all tables: light, readable without colour, narrow enough for 80 columns; and the console for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import partial

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autockpt.schema.choices import SAVE, Choice, legend

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


def simulated(step_note: str = "") -> Text:
    """What a ``~`` stands for, beneath a table; with what is known of its step times."""
    return Text(". ".join(filter(None, ["~ simulated, not measured", step_note])), style="dim")


class _Table(Table):
    """A table whose cells are text as it is, without markup."""

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:  # type: ignore[override]
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def plain_table(*columns: str, show_header: bool = True) -> Table:
    """An empty table in the project's look; two spaces between columns.

    A column is named by its heading: ``>peak`` is aligned right, ``<choices`` left, as columns are by default. Cells
    are broken into lines where the screen is narrow.
    """
    table = _Table(
        box=RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_header=show_header,
        caption_justify="left", caption_style="dim",
    )  # fmt: skip
    for column in columns:
        justify = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip("<>"), justify=justify, overflow="fold")
    return table


def heading(text: str, console: Console, *beneath: RenderableType) -> None:
    """An empty line, what the next ones are about, and these."""
    console.print()
    console.print(Text(text, style="bold"))
    for part in beneath:
        console.print(part)


def bullets(lines: Iterable[str]) -> Table:
    """Paragraphs with a hanging indent."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("•", Text(line))
    return grid


def remarks(lines: Sequence[str], console: Console) -> None:
    """An empty line and these as paragraphs, where there are any."""
    if lines:
        console.print()
        console.print(bullets(lines))


def print_legend(choices: Iterable[Choice], console: Console) -> None:
    """A dim line for each kind of choice that occurs besides ``save``: what it does."""
    for line in legend(choice for choice in choices if choice != SAVE):
        console.print(Padding.indent(Text(line, style="dim"), 2))


# C0 and C1 controls but for tab and newline, and what turns the direction of text around
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """The text with control characters escaped, as ``\\x1b``."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SafeConsole(Console):
    """Prints control characters of what it is given escaped; colours and cursor movements of its own stay.

    Raises BrokenPipeError where the reader of the output is gone; rich would end the process.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROLS.search(segment.text):
                yield Segment(shown(segment.text), segment.style)
            else:
                yield segment


def bar(share: float, width: int) -> str:
    """A horizontal bar for a share of ``width`` characters; a sliver for what is less than one of them."""
    full = round(share * width)
    return "█" * full if full or share < 0.001 else "▏"


def console(stderr: bool) -> Console:
    """Colour only on terminals and without NO_COLOR; pipes and files get 120 columns unless COLUMNS says otherwise.
    Widths below 10 count as unknown: containers and editors write ``COLUMNS=0``.

    Results in a notebook are plain text: as HTML every line would be an output of its own.
    """
    plain = partial(SafeConsole, stderr=stderr, highlight=False, markup=False, emoji=False)
    made = plain()
    if made.is_jupyter and not stderr:
        made = plain(force_jupyter=False, force_terminal=False)
    if made.width < 10 or not (made.is_terminal or os.environ.get("COLUMNS")):
        made.width = 120
    return made
