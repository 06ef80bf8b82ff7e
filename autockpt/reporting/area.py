"""Bytes over time in block characters: as an area, what is fixed below what comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autockpt.schema.explanation import Curve
from autockpt.schema.graph import Span
from autockpt.schema.sizes import format_binary

BLOCKS = "▁▂▃▄▅▆▇█"
CUT = 0.4  # where more than this share of the peak is always there, the axis begins above zero


@dataclass(frozen=True)
class Marks:
    """Characters of a drawing: ``fixed``, ``growing``, and the levels of what comes and goes, empty to full."""

    fixed: str = "░"
    growing: str = "▒"
    levels: str = f" {BLOCKS}"
    axis: str = "┤"
    budget: str = "┄"
    peak: str = "▼"
    ours: str = "→"
    bar: str = "█"


BLOCK = Marks()
PLAIN = Marks(fixed=".", growing=":", levels="  ###", axis="|", budget="-", peak="v", ours=">", bar="#")


def encodes(encoding: str, text: str = BLOCKS) -> bool:
    """Whether an output encoding has the block characters, or those of another text."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def marks_of(encoding: str) -> Marks:
    """Marks that an output encoding has."""
    return BLOCK if encodes(encoding) else PLAIN


@dataclass(frozen=True)
class Area:
    """Lines of a chart, top to bottom, each with its label; and the column of the peak."""

    lines: tuple[tuple[str, str], ...]
    peak_column: int
    low: int
    high: int


def draw(curve: Curve, columns: int, rows: int, marks: Marks = BLOCK, budget_bytes: int | None = None) -> Area:
    """The curve in a field of ``columns`` × ``rows`` characters; the budget as a line, where it is near enough."""
    at = resampled(curve.total, columns)
    peak = max(curve.total, default=0)
    high = max(peak, budget_bytes) if budget_bytes is not None and budget_bytes <= 1.3 * peak else peak
    floor = min((curve.total[i] for i in at), default=0)
    low = int(floor * 0.85) if peak and floor > CUT * peak else 0
    height = max(1, high - low) / rows
    shown = budget_bytes is not None and low <= budget_bytes <= high
    budget_row = min(rows - 1, int((budget_bytes - low) / height)) if budget_bytes is not None and shown else None
    lines = []
    for row in reversed(range(rows)):
        bottom, top = low + row * height, low + (row + 1) * height
        empty = marks.budget if row == budget_row else " "
        cells = (_cell(curve, i, bottom, top, marks) for i in at)
        label = format_binary(top) if row in (rows - 1, rows // 2) else ""
        label = f"budget {marks.budget}" if row == budget_row else label
        lines.append((label, "".join(empty if c == " " else c for c in cells)))
    values = [curve.total[i] for i in at]
    return Area(tuple(lines), values.index(max(values)) if values else 0, low, high)


def _cell(curve: Curve, i: int, bottom: float, top: float, marks: Marks) -> str:
    """One character: what lies in the middle of a full cell, or how far the top reaches into it."""
    total, fixed = curve.total[i], curve.fixed[i]
    solid = fixed + curve.growing[i]
    middle = (bottom + top) / 2
    if middle < fixed:
        return marks.fixed
    if middle < solid:
        return marks.growing
    if total <= bottom:
        return " "
    share = min(1.0, (total - bottom) / (top - bottom))
    return marks.levels[max(1, round(share * (len(marks.levels) - 1)))] if total > solid else " "


def resampled(values: Sequence[int], columns: int) -> list[int]:
    """The index of the largest value of each of ``columns`` equal runs; repeated where there are fewer values."""
    if not values:
        return []
    bounds = pairwise(column * len(values) // columns for column in range(columns + 1))
    return [max(range(first, max(first + 1, last)), key=values.__getitem__) for first, last in bounds]


def ruler(spans: Sequence[Span], ops: int, columns: int) -> str:
    """Phase names under the part of the chart that they take; a bar where each begins."""
    line = [" "] * columns
    for span in spans:
        start = span.start * columns // max(1, ops)
        stop = max(start + 1, span.stop * columns // max(1, ops))
        text = f"|{span.phase}"[: stop - start]
        line[start : start + len(text)] = text
    return "".join(line).rstrip()


def bar(share: float, width: int, marks: Marks = BLOCK) -> str:
    """A horizontal bar for a share of ``width`` characters; a sliver for what is less than one of them."""
    full = round(share * width)
    return marks.bar * full if full or share < 0.001 else ("▏" if marks is BLOCK else ".")
