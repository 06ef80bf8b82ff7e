"""The lines of a log, split by the process that wrote them.

Launchers, loggers and container runtimes write something in front of every line: a host, a rank, a time, a level. Which
ones there are is not listed here. The prefix is what stands in front of the frames of a traceback, with times left
out; lines that begin alike belong to the same stream, and are read without it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from autockpt.errors import UsageError

CHUNK = 1 << 20
BEFORE, AFTER = 2 << 20, 1 << 18  # bytes around the last marker that are read
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LINES = re.compile(r"\r\n|[\n\r\v\f\x85\u2028\u2029]")
_REPEATED = re.compile(r" ?\[repeated \d{1,9}x across cluster\].{0,300}$")  # Ray's, behind a line

_LONGEST_PREFIX = 200
_TIME = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T ]+\d\d:\d\d:\d\d(?:[.,:]\d+)?)?(?: ?(?:Z|[+-]\d\d:?\d\d)\b)?"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d,? (?:\d{4} )?\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|(?:\b\d\d[-/]\d\d(?:[-/]\d\d(?:\d\d)?)?|\d{4})[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?!\d)(?: [AP]M\b)?"
    r"|\b\d{10}(?:\d{3})?(?:\.\d+)?\b"
    r"| *(?<![\d.])\d{1,9}\.\d{3,9}(?![\d.])"  # seconds since something; no address
)
_MASK = "\0"
_FRAME = re.compile(r'(.{0,199}?\S *)(?:File "[^"]{1,300}", line [\d\0]|File [/~.\w]\S{0,300}?:[\d\0]+, in |╭─)')
_RANK_LABEL = re.compile(
    r"(?:[\[(]?\0[\])]? ?)?(?:\[(?:rank|default|local_rank):?\s*\d{1,5}\]:? ?|\[\d{1,5}\]:? "
    r"|\[(?:\d+,)?\d{1,5}\]<std\w+>: ?| *\d{1,5}: )"
)
_RANK_WORD = re.compile(r"\b(?:rank|default|local_rank)[ :=]{0,3}(\d{1,5})\b|\[(?:\d+,)?(\d{1,5})\]<std", re.IGNORECASE)
_RANK_FIRST = re.compile(r"(?:[\[(]?\0[\])]? ?)?(?:\[(\d{1,5})\]:? | *(\d{1,5}): )")
_COUNTED = 2  # more prefixes than these, hardly two of them alike, differ by a counter


class Stream(NamedTuple):
    """What one process wrote: its lines without their prefix, and its rank where the prefix names it."""

    rank: int | None
    lines: list[str]


def streams(lines: Sequence[str]) -> list[Stream]:
    """Lines by what wrote them, prefixes taken off. Takes time linear in the lines."""
    masked = [_masked(line, _TIME) for line in lines]
    prefixes = [prefix for line in masked if (prefix := _prefix(line))]
    mask = _TIME
    if len(set(prefixes)) > max(_COUNTED, len(prefixes) // 2):
        mask = re.compile(rf"{_TIME.pattern}|\d+")
        masked = [_masked(line, mask) for line in lines]
        prefixes = [prefix for line in masked if (prefix := _prefix(line))]
    known = set(prefixes)
    lengths = sorted({len(prefix) for prefix in known}, reverse=True)
    out: dict[int | str, Stream] = {}
    for line, bare in zip(lines, masked, strict=True):
        prefix = next((bare[:n] for n in lengths if bare[:n] in known), "")
        if not prefix and (label := _RANK_LABEL.match(bare)) is not None:
            prefix = label[0]
        taken = _unmasked(line, mask, len(prefix))
        rank = rank_in(line[:taken])
        stream = out.setdefault(prefix if rank is None else rank, Stream(rank, []))
        stream.lines.append(line[taken:])
    return list(out.values())


def rank_in(prefix: str) -> int | None:
    """The rank that a prefix names."""
    match = _RANK_WORD.search(prefix) or _RANK_FIRST.match(_masked(prefix, _TIME))
    number = next(filter(None, match.groups()), None) if match is not None else None
    return int(number) if number is not None else None


def _masked(line: str, mask: re.Pattern[str]) -> str:
    """The beginning of a line without what differs from line to line."""
    return mask.sub(_MASK, line[:_LONGEST_PREFIX])


def _unmasked(line: str, mask: re.Pattern[str], length: int) -> int:
    """How many characters of a line so many of the masked line are."""
    for match in mask.finditer(line[:_LONGEST_PREFIX]) if length else ():
        if match.start() >= length:
            break
        length += match.end() - match.start() - 1
    return length


def _prefix(masked: str) -> str:
    """What stands in front of a frame of a traceback, or of the box around one."""
    if "File " not in masked and "╭" not in masked:
        return ""
    match = _FRAME.match(masked)
    if match is None:
        return ""
    return match[1][:-2] if match[1].endswith("  ") else match[1]  # frames are indented by two


def read_window(path: Path, markers: Iterable[str], after: int = 0) -> tuple[str, int | None]:
    """The text around the last marker of a file, and its offset in bytes; without one, the file's end and None.

    What lies before the offset ``after`` is left out.

    Reads from the end, so that a log's size does not matter. Raises UsageError for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            encoding = _encoding(file.read(4))
            size = file.seek(0, os.SEEK_END)
            found = _last(file, size, [marker.lower().encode(encoding) for marker in markers], after)
            start = max(min(after, size), (size if found is None else found) - BEFORE)
            start -= start % 2 if encoding != "utf-8" else 0
            file.seek(start)
            data = file.read((size if found is None else min(size, found + AFTER)) - start)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"{path} cannot be read: {why}", remedy="Name the log of the failed run.") from None
    return data.decode(encoding, errors="replace").lstrip("\ufeff"), found


def read_head(path: Path) -> str:
    """The first text of a file. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(AFTER)
    return data.decode(_encoding(data), errors="replace")


def _encoding(head: bytes) -> str:
    """UTF-8, or what PowerShell's redirection writes."""
    if head.startswith(b"\xff\xfe"):
        return "utf-16-le"
    return "utf-16-be" if head.startswith(b"\xfe\xff") else "utf-8"


def _last(file: BinaryIO, size: int, markers: Sequence[bytes], floor: int) -> int | None:
    """Offset of the last of the markers, in any case, from ``floor`` on; looked for from the end, in chunks."""
    overlap, end = 256, size
    while end > floor:
        start = max(floor, end - CHUNK)
        file.seek(start)
        chunk = file.read(min(size, end + overlap) - start).lower()
        found = max(map(chunk.rfind, markers))
        if found >= 0:
            return start + found
        end = start
    return None


def clean_lines(text: str) -> list[str]:
    """Lines without colour codes, empty ones left out; what a progress bar overwrote is a line of its own."""
    lines = (part for line in _LINES.split(_ANSI.sub("", text)) for part in _of_json(line))
    return [bare for line in lines if (bare := _REPEATED.sub("", line).rstrip())]


def _of_json(line: str) -> Iterator[str]:
    """The lines in the record of a log whose lines are JSON, such as Docker's; any other line as it is."""
    if line.startswith("{") and line.endswith("}") and '"' in line:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            texts = (record.get(name) for name in ("log", "message", "msg", "text", "event"))
            if (text := next((t for t in texts if isinstance(t, str)), None)) is not None:
                yield from _LINES.split(text)
                for name in ("exc_info", "stack_trace", "exception"):  # of structured loggers
                    if isinstance(trace := record.get(name), str):
                        yield from _LINES.split(trace)
                return
    yield line
