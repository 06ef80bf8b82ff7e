"""Stacks out of a log: Python's own tracebacks, IPython's of both kinds, and rich's boxes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autockpt.schema.diagnosis import Frame

MOST = 400  # frames of one stack that are kept
_PYTHON = re.compile(r'^\s*File "([^"]{1,500})", line (\d{1,9}), in (\S.{0,200})$')
_IPYTHON = re.compile(r"^\s*File (\S.{0,400}?):(\d{1,9}), in ([\w.<>]+)")
_OLD_IPYTHON = re.compile(r"^\s*([~/.\w][^\s:]{0,400}\.py) in ([\w.<>]+)\(")
_RICH = re.compile(r"^[│|]\s*(\S.{0,400}?):(\d{1,9}) in ([\w.<>]+)")
_ARROW = re.compile(r"^[│|\s]*(?:-+>|❱)\s*(\d{1,9})[ │]*(.*)$")
_START = re.compile(r"Traceback \(most recent call last\)|Traceback\s+\(most recent call last\)")
_CARETS = re.compile(r"^[\s^~]+$")


def frames_before(lines: Sequence[str], end: int, begin: int = 0) -> tuple[Frame, ...]:
    """The stack that ends with the message in line ``end``, outermost frame first; empty where there is none.

    The stack goes back to the nearest line that begins a traceback, or to the first frame of an unbroken run, and not
    behind line ``begin``. Lines end without spaces.
    """
    start = next((i for i in range(end, max(begin - 1, end - 4000), -1) if _START.search(lines[i])), None)
    if start is None:
        start = max(begin, end - 400)
    found: list[Frame] = []
    for index in range(start, end):
        frame = _frame(lines, index)
        if frame is not None:
            found.append(frame)
        elif found and (arrow := _ARROW.match(lines[index])) is not None and not found[-1].code:
            # IPython and rich show some lines around; the arrow points to the one that ran
            found[-1] = found[-1].model_copy(update={"code": arrow[2].rstrip(" │|"), "line": int(arrow[1])})
    return tuple(found[-MOST:])


def _frame(lines: Sequence[str], index: int) -> Frame | None:
    line = lines[index]
    if (match := _PYTHON.match(line)) is not None:
        after = lines[index + 1] if index + 1 < len(lines) else ""
        plain = not _PYTHON.match(after) and not _CARETS.match(after) and after[:1].isspace()
        return Frame(file=match[1], line=int(match[2]), function=match[3], code=after.strip() if plain else "")
    if (match := _RICH.match(line) or _IPYTHON.match(line)) is not None:
        return Frame(file=match[1], line=int(match[2]), function=match[3])
    if (match := _OLD_IPYTHON.match(line)) is not None:
        return Frame(file=match[1], function=match[2])
    return None
