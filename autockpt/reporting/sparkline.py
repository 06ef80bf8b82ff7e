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


def resample(values: Sequence[int], width: int) -> list[int]:
    """Exactly ``width`` values: the largest of each run, or each repeated where there are fewer."""
    if not values:
        return [0] * width
    result = []
    for column in range(width):
        first = column * len(values) // width
        last = max(first + 1, (column + 1) * len(values) // width)
        result.append(max(values[first:last]))
    return result


def can_draw(encoding: str) -> bool:
    """Whether an output encoding has the block characters."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
