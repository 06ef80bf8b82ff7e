"""The console that everything is printed on: what a name, a path or a log brings along cannot drive the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 and C1 controls but for tab and newline, and what turns the direction of text around
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """The text with control characters escaped, as ``\\x1b``."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SafeConsole(Console):
    """Prints control characters of what it is given escaped; colours and cursor movements of its own stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROLS.search(segment.text):
                yield Segment(shown(segment.text), segment.style)
            else:
                yield segment


def console(stderr: bool) -> Console:
    """Colour only on terminals and without NO_COLOR; pipes and files get 120 columns unless COLUMNS says otherwise."""
    made = SafeConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = 120
    return made
