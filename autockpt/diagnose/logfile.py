"""The part of a log that tells of its end: found from the end, cleaned, and told apart by rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from autockpt.errors import UsageError

CHUNK = 1 << 20
BEFORE, AFTER = 2 << 20, 1 << 18  # bytes around the last marker that are read
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LINES = re.compile(r"\r\n|[\n\r\v\f\x85\u2028\u2029]")
# torchrun's own, mpirun's --tag-output, srun's --label, accelerate's and DeepSpeed's: always in front
_RANK = re.compile(
    r"^(?:\[(?:rank|default|local_rank):?\s*(\d{1,5})\]:? ?|\[(\d{1,5})\]:? "
    r"|\[\d+,(\d{1,5})\]<std\w+>: ?|(\d{1,5}): )"
)
_PREFIXES = tuple("[0123456789")  # what a rank or a time in front begins with
_STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*Z?\]? ")


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
    return [bare for line in _LINES.split(_ANSI.sub("", text)) if (bare := line.rstrip())]


def by_rank(lines: Iterable[str]) -> dict[int | None, list[str]]:
    """Lines by the rank that their prefix names, prefixes taken off; None for those without one."""
    out: dict[int | None, list[str]] = {}
    for line in lines:
        if not line.startswith(_PREFIXES):
            out.setdefault(None, []).append(line)
            continue
        bare = _STAMP.sub("", line)
        match = _RANK.match(bare)
        number = next((g for g in match.groups() if g is not None), None) if match else None
        rank = int(number) if number is not None else None
        out.setdefault(rank, []).append(bare[match.end() :] if match else bare)
    return out
