"""Numbers over time as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"


def sparkline(values: Sequence[float], low: float, high: float, levels: str = BLOCKS) -> str:
    """A character per value, the lowest level at ``low`` and the highest only at ``high`` itself or above."""
    span = high - low
    if span <= 0:
        return levels[0] * len(values)
    top = len(levels) - 1
    return "".join(levels[max(0, min(top, int((v - low) / span * top)))] for v in values)


def can_draw(encoding: str) -> bool:
    """Whether an output encoding has the block characters."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
