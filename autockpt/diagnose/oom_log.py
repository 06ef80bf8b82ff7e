"""Out-of-memory messages of PyTorch's device allocators, with the stack in front of them, out of a log.

Stacks are Python's own tracebacks, IPython's of both kinds, and rich's boxes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from autockpt.diagnose.frames import place_of
from autockpt.diagnose.host import HOST_MARKERS, host_failure
from autockpt.diagnose.log_lines import AFTER, clean_lines, rank_in, read_head, read_window, streams
from autockpt.diagnose.run_facts import facts_of
from autockpt.diagnose.wordings import BEGINS, DEVICE_MARKERS, LONGEST, STATUS, backend_of, parse_message
from autockpt.errors import UsageError
from autockpt.schema.diagnosis import DeviceFailure, Frame, LogReading
from autockpt.schema.files import read_regular, reason

MOST = 400  # frames of one stack that are kept
_PYTHON = re.compile(r'^\s*File "([^"]{1,500})", line (\d{1,9}), in (\S.{0,200})$')
_IPYTHON = re.compile(r"^\s*File (\S.{0,400}?):(\d{1,9}), in ([\w.<>]+)")
_OLD_IPYTHON = re.compile(r"^\s*([~/.\w][^\s:]{0,400}\.py) in ([\w.<>]+)\(")
_RICH = re.compile(r"^[│|]\s*(\S.{0,400}?):(\d{1,9}) in ([\w.<>]+)")
_ARROW = re.compile(r"^[│|\s]*(?:-+>|❱)\s*(\d{1,9})[ │]*(.*)$")
_START = re.compile(r"Traceback\s+\(most recent call last\)")
_CARETS = re.compile(r"^[\s^~]+$")


def frames_before(lines: Sequence[str], end: int, begin: int = 0) -> tuple[Frame, ...]:
    """The stack that ends with the message in line ``end``, outermost frame first; empty where there is none.

    The stack goes back to the nearest line that begins a traceback, or to the first frame of an unbroken run, and not
    behind line ``begin``. Lines end without spaces.
    """
    start = next((i for i in range(end, max(begin - 1, end - 4000), -1) if _START.search(lines[i])), None)
    found: list[Frame] = []
    for index in range(max(begin, end - 400) if start is None else start, end):
        if (frame := _frame(lines, index)) is not None:
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


_FOLLOWING = 14  # lines that a terminal may have wrapped a message into
_MOST = 500  # messages of one stream, and _MOST_IN_ALL of all, that are looked at: the last
_MOST_IN_ALL = 2000
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)\b")
_NOISE = re.compile(r"[\s│|╭╰─]+")
_NEXT = re.compile(r"Traceback \(most|\bFile \"|During handling|(?<=.{20})\b[A-Z]\w+ (?:backend )?out of memory")
_LAST_ERROR = re.compile(r"^\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)\b.{0,200})")


def read_log(path: Path) -> LogReading:
    """What a log says about running out of memory, its last failure first.

    Raises UsageError for a file that cannot be read, or in which nothing ran out of memory.
    """
    _check_kind(path)
    text, at = read_window(path, DEVICE_MARKERS)
    head = read_head(path)
    reading = read_text(text, str(path), head)
    # a run may outlive its device's failure and be ended by the host's
    later, host_at = read_window(path, HOST_MARKERS, after=(at or 0) + AFTER if reading.failures else 0)
    if host_at is not None and (last := read_text(later, str(path), head)).host is not None:
        reading = last
    if not reading.failures and reading.host is None:
        last_lines = reversed(clean_lines(text)[-400:])
        error = next((m for line in last_lines if (m := _LAST_ERROR.match(line)) is not None), None)
        ending = f"; it ends with {error[1].strip()[:160]}" if error else ""
        raise UsageError(f"{path} has no message of PyTorch's that memory ran out{ending}", remedy=_REMEDY)
    return reading


_REMEDY = "Name the log that has the message “CUDA out of memory. Tried to allocate …” (standard error of the run)."
_OTHER_FILES = {
    b"PK\x03\x04": ("a zip archive, as torch.save writes", "Unpack it first."),
    b"\x1f\x8b": ("compressed with gzip", "Unpack it first."),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "Unpack it first."),
    b"\x80": (
        "a pickle, perhaps a memory snapshot",
        "PyTorch's viewer shows snapshots: https://docs.pytorch.org/memory_viz.",
    ),
}


def _check_kind(path: Path) -> None:
    """Raise UsageError for a file that cannot be read or is surely no log."""
    try:
        head = read_regular(path, 8, links=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", remedy="Name the log of the failed run.") from None
    for magic, (what, remedy) in _OTHER_FILES.items():
        if head.startswith(magic):
            raise UsageError(f"{path} is {what}, not a log", remedy=remedy)


def read_text(text: str, path: str = "", head: str = "") -> LogReading:
    """The same for text. Nothing is raised: a reading without failures says that there is none.

    ``head``: how the log begins, where runs describe themselves.
    """
    found_streams = streams(clean_lines(text))
    facts = facts_of(f"{head}\n{text}")
    found: dict[tuple[int | None, int | None], DeviceFailure] = {}
    every = (failure for stream in found_streams for failure in _failures(stream.lines, stream.rank))
    looked_at = list(islice(every, _MOST_IN_ALL))
    for failure in looked_at:
        key = (failure.rank, failure.device)
        # a message is often printed again without its stack, or by a handler: the fuller one says more
        if key not in found or _fullness(failure) >= _fullness(found[key]):
            found.pop(key, None)
            found[key] = failure
    # without those that came again without their rank
    ranked = {(f.device, f.tried, f.allocated) for f in found.values() if f.rank is not None}
    failures = [f for f in found.values() if f.rank is not None or (f.device, f.tried, f.allocated) not in ranked]
    first = facts.pop("first_rank")
    if len(failures) == 1 and failures[0].rank is None:
        failures = [failures[0].model_copy(update={"rank": first})]
    failures.sort(key=lambda f: (not f.allocated, f.rank is None, f.rank != first, f.rank or 0, f.device or 0))
    failures = [f for f in failures if f.tried is not None or f.allocated is not None] or failures
    host = None if failures else next(filter(None, (host_failure(s.lines, s.rank) for s in found_streams)), None)
    return LogReading(
        path=path,
        failures=tuple(failures),
        host=host,
        count=len(looked_at),
        notes=tuple(_notes(failures)),
        **facts,
    )


def _failures(lines: Sequence[str], rank: int | None) -> Iterator[DeviceFailure]:
    """The last failures that the lines tell of, in their order. Takes time linear in the lines, whatever they hold."""
    begins = {i: m.start() for i, line in enumerate(lines) if (m := BEGINS.search(line)) is not None}
    bare = {i: status for i, line in enumerate(lines) if i not in begins and (status := _bare_status(line))}
    before = 0  # where the stack of the next message may begin
    for index in sorted([*begins, *bare])[-_MOST:]:
        line = lines[index]
        if index in bare:
            failure = DeviceFailure(backend=backend_of(bare[index]), rank=rank, text=line.strip()[:500])
        else:
            start = begins[index]
            following = (text[:LONGEST] for text in lines[index + 1 : index + _FOLLOWING])
            message = " ".join([line[start : start + LONGEST], *following])
            # the next message or stack is another's
            of_line = rank_in(line[: min(start, 200)]) if rank is None else rank
            failure = parse_message(_NEXT.split(_NOISE.sub(" ", message[:LONGEST]))[0], of_line)
            if failure.tried is None and not _EXCEPTION.search(line[:start]):
                continue  # somebody writes about running out of memory
        yield failure.model_copy(update={"place": place_of(frames_before(lines, index, before))})
        before = index + 1


def _bare_status(line: str) -> str:
    """The status of an exception that names one, without figures; empty where there is none."""
    if STATUS.search(line) is None or (exception := _EXCEPTION.search(line)) is None:
        return ""
    status = STATUS.search(line, exception.end())
    return f"{exception[0]} {status[0]}" if status is not None else ""


def _fullness(failure: DeviceFailure) -> int:
    """How much a message says: its figures first, then whether it has a stack."""
    figures = (failure.tried, failure.capacity, failure.allocated)
    return 2 * sum(f is not None for f in figures) + (failure.place.stage != "unknown")


def _notes(failures: Sequence[DeviceFailure]) -> Iterator[str]:
    ranks = [f for f in failures if f.rank is not None or f.device is not None]
    if len(ranks) > 1:
        names = ", ".join(f"rank {f.rank}" if f.rank is not None else f"GPU {f.device}" for f in ranks[:16])
        names += f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
        yield f"{names} ran out of memory; the first is looked at"
