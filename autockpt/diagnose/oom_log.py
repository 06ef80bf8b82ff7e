"""Out-of-memory messages of PyTorch's device allocators, with the stack in front of them, out of a log.

Stacks are Python's own tracebacks, IPython's of both kinds, and rich's boxes.

Wordings are those of c10/cuda/CUDACachingAllocator.cpp from 1.0 on, of its HIP and XPU twins, and of MPSAllocator.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from autockpt.diagnose.frames import place_of
from autockpt.diagnose.host import HOST_MARKERS, host_failure
from autockpt.errors import UsageError
from autockpt.schema.diagnosis import Backend, DeviceFailure, Frame, LogReading
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


# what the search from the end looks for: bytes that every wording of a device's message has
DEVICE_MARKERS = ("out of memory", "tried to allocate", "status_alloc_failed", "ErrorOutOfMemory", "ErrorMemoryAlloc")
_FOLLOWING = 14  # lines that a terminal may have wrapped a message into
_LONGEST = 4000  # characters of a message that are looked at
_MOST = 500  # messages of one rank, and _MOST_IN_ALL of all ranks, that are looked at: the last
_MOST_IN_ALL = 2000
_LARGEST = 2**50
_SIZE = r"([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(bytes?|[KMGT]i?B)"

_BEGINS = re.compile(r"(?:\b(CUDA|HIP|XPU)|\b(MPS) backend) (?:error: )?out of memory", re.IGNORECASE)
# what stands behind the name of an exception in messages without figures
_STATUS = re.compile(
    r"(?:CUBLAS|CUDNN|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|UR_RESULT_ERROR_OUT_OF_(?:DEVICE_)?(?:MEMORY|RESOURCES)|Cuda failure 2? ?'out of memory'"
)
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)\b")
_NOISE = re.compile(r"[\s│|╭╰─]+")
_NEXT = re.compile(r"Traceback \(most|\bFile \"|During handling|(?<=.{20})\b\w+ out of memory")
_FIELDS = {
    "tried": (rf"Tried to allocate {_SIZE}", rf"Requested size: {_SIZE}"),
    "capacity": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"max allowed: {_SIZE}"),
    "free": (rf"of which {_SIZE} is free", rf"already allocated; {_SIZE} free"),
    "allowed": (rf"{_SIZE} allowed;", rf"; {_SIZE} allowed\)"),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated", rf"MPS allocated: {_SIZE}"),
    "cached": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached\)"),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "other": (rf"other allocations: {_SIZE}",),
}
_PATTERNS = {name: tuple(re.compile(p, re.IGNORECASE) for p in patterns) for name, patterns in _FIELDS.items()}
_STAGE = re.compile(r"zero_optimization_stage[ .]{1,40}([0-3])\b|[\"']stage[\"'] ?: ?([0-3])\b")
_DEVICE = re.compile(r"GPU +(\d{1,4})\b")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_LAST_ERROR = re.compile(r"^\s*((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)\b.{0,200})")
_ROUNDED = 0.99  # two figures that differ by less are the same
HIDDEN = 256 << 20  # bytes that nobody accounts for, from which on another process is assumed to hold them


def read_log(path: Path) -> LogReading:
    """What a log says about running out of memory, its last failure first.

    Raises UsageError for a file that cannot be read, or in which nothing ran out of memory.
    """
    _check_kind(path)
    text, at = read_window(path, DEVICE_MARKERS)
    reading = read_text(text, str(path))
    if reading.zero_stage is None:  # said when the run begins
        reading = reading.model_copy(update={"zero_stage": _zero_stage(read_head(path))})
    # a run may outlive its device's failure and be ended by the host's
    later, host_at = read_window(path, HOST_MARKERS, after=(at or 0) + AFTER if reading.failures else 0)
    if host_at is not None and (last := read_text(later, str(path))).host is not None:
        reading = last.model_copy(update={"zero_stage": reading.zero_stage})
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


def read_text(text: str, path: str = "") -> LogReading:
    """The same for text. Nothing is raised: a reading without failures says that there is none."""
    streams = by_rank(clean_lines(text))
    found: dict[tuple[int | None, int | None], DeviceFailure] = {}
    every = (failure for rank, lines in streams.items() for failure in _failures(lines, rank))
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
    failures.sort(key=lambda f: (not f.allocated, f.rank is None, f.rank or 0, f.device or 0))
    failures = [f for f in failures if f.tried is not None or f.allocated is not None] or failures
    host = None if failures else next(filter(None, (host_failure(v, rank) for rank, v in streams.items())), None)
    return LogReading(
        path=path,
        failures=tuple(failures),
        host=host,
        zero_stage=_zero_stage(text),
        count=len(looked_at),
        notes=tuple(_notes(failures)),
    )


def _zero_stage(text: str) -> int | None:
    """The ZeRO stage that DeepSpeed says it runs with, as it prints its configuration."""
    found = [match[1] or match[2] for match in _STAGE.finditer(text)]
    return int(found[-1]) if found else None


def _failures(lines: Sequence[str], rank: int | None) -> Iterator[DeviceFailure]:
    """The last failures that the lines tell of, in their order. Takes time linear in the lines, whatever they hold."""
    begins = {i: m.start() for i, line in enumerate(lines) if (m := _BEGINS.search(line)) is not None}
    bare = {i: status for i, line in enumerate(lines) if i not in begins and (status := _bare_status(line))}
    before = 0  # where the stack of the next message may begin
    for index in sorted([*begins, *bare])[-_MOST:]:
        line = lines[index]
        if index in bare:
            failure = DeviceFailure(backend=_backend(bare[index]), rank=rank, text=line.strip()[:500])
        else:
            start = begins[index]
            following = (text[:_LONGEST] for text in lines[index + 1 : index + _FOLLOWING])
            message = " ".join([line[start : start + _LONGEST], *following])
            # the next message or stack is another's
            failure = parse_message(_NEXT.split(_NOISE.sub(" ", message[:_LONGEST]))[0], rank)
            if failure.tried is None and not _EXCEPTION.search(line[:start]):
                continue  # somebody writes about running out of memory
        yield failure.model_copy(update={"place": place_of(frames_before(lines, index, before))})
        before = index + 1


def _bare_status(line: str) -> str:
    """The status of an exception that names one, without figures; empty where there is none."""
    if _STATUS.search(line) is None or (exception := _EXCEPTION.search(line)) is None:
        return ""
    status = _STATUS.search(line, exception.end())
    return f"{exception[0]} {status[0]}" if status is not None else ""


def parse_message(text: str, rank: int | None = None) -> DeviceFailure:
    """The figures of one message, in bytes; what it does not say, or what cannot be, is None."""
    begins = _BEGINS.search(text)
    sizes: dict[str, Any] = {name: _first(patterns, text) for name, patterns in _PATTERNS.items()}
    reserved, other = sizes.pop("reserved"), sizes.pop("other")
    if reserved is not None and sizes["allocated"] is not None:
        sizes["cached"] = max(0, reserved - sizes["allocated"])
    sizes["process"], sizes["others"] = _processes(text, sizes, other or 0)
    device = _DEVICE.search(text)
    start = begins.start() if begins else 0
    ends = [m.end() for patterns in _PATTERNS.values() for p in patterns if (m := p.search(text, start)) is not None]
    return DeviceFailure(
        backend=_backend(next(filter(None, begins.groups()), "cuda") if begins else "cuda"),
        rank=rank,
        device=int(device[1]) if device else None,
        text=text[start : max(ends, default=start + 200)][:800].strip(),  # without what follows its last figure
        **sizes,
    )


def _processes(text: str, sizes: dict[str, Any], other: int) -> tuple[int | None, int | None]:
    """Bytes of this process and of others.

    In a container a process does not know its own number and calls itself "Process 123": the one whose memory is next
    above what PyTorch holds is this one, and so is the one that comes again where both cannot fit on the device.
    """
    named = [size for match in _PROCESS.finditer(text) if (size := _bytes(match[1], match[2])) is not None]
    process, capacity, free, allocated = (sizes[name] for name in ("process", "capacity", "free", "allocated"))
    if process is not None and capacity is not None and process > capacity:
        process = None  # an unsigned difference that wrapped around
    if process is None and allocated is not None:
        held = _ROUNDED * (allocated + (sizes["cached"] or 0))
        if (process := min((size for size in named if size >= held), default=None)) is not None:
            named.remove(process)
    elif process is not None and capacity is not None and process + sum(named) > capacity - (free or 0) + HIDDEN:
        again = min(named, key=lambda size: abs(size - process), default=None)
        if again is not None and min(again, process) >= _ROUNDED * max(again, process):
            named.remove(again)
    others = sum(named) + other
    if process is not None and capacity is not None and free is not None:
        hidden = capacity - free - process
        others = max(others, hidden) if hidden >= HIDDEN else others
    return process, others or None


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    match = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
    return _bytes(match[1], match[2]) if match is not None else None


def _bytes(number: str, unit: str) -> int | None:
    """PyTorch's sizes count in 1024s, also where older versions write GB."""
    size = round(float(number) * 1024 ** "bkmgt".index(unit[0].lower()))
    return size if size < _LARGEST else None


def _backend(words: str) -> Backend:
    low = words.lower()
    if "mps" in low:
        return "mps"
    if "hip" in low or "miopen" in low:
        return "hip"
    return "xpu" if "xpu" in low or "ur_result" in low else "cuda"


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
