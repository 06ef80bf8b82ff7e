"""The wordings of out-of-memory messages, and their figures.

They are those of c10/cuda/CUDACachingAllocator.cpp from 1.0 on, of its twins (HIP, XPU, and torch_npu's and others'
copies of it), of CUDAMallocAsyncAllocator.cpp, MPSAllocator and Habana's bridge.

Figures can contradict one another: in a container the driver may not know what this process holds, and unsigned
differences wrap around. PyTorch's own counters (allocated, reserved) are taken to be right, the driver's are not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autockpt.schema.diagnosis import Backend, DeviceFailure

# bytes that every wording of a device's message has, in any case
DEVICE_MARKERS = (
    "out of memory",
    "tried to allocate",
    "allocation on device",
    "allocation failed for size",
    "allocation of size",
    "invalid buffer size",
    "alloc_failed",
    "allocation_failed",
    "memory_error",
    "ErrorOutOfMemory",
    "ErrorMemoryAlloc",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_MEMORY",
    "OUT_OF_RESOURCES",
    "MEMORY_ALLOCATION",
)
LONGEST = 4000  # characters of a message that are looked at
_LARGEST = 2**50
_SIZE = r"([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(bytes?|[KMGT]i?B)"

# any accelerator's name, as a backend of PyTorch's may bring its own
BEGINS = re.compile(
    r"(?:\b(?i:(CUDA|HIP|XPU|NPU|HPU|MPS|MUSA|MLU))\b|\b(?!ERROR|FATAL|CPU|RAM|HOST|SYSTEM)([A-Z]{3,8}|PrivateUse1)\b)"
    r"(?i:(?: backend| driver)?(?: error:)? out of memory)"
    r"|Allocation on device\b|\b(FATAL ERROR :: MODULE:\w+)(?=.{0,40}Allocation (?:failed for|of) size)"
    r"|\bInvalid buffer size: (?=[0-9])"
)
STATUS = re.compile(
    r"\w+_STATUS_(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)"
    r"|rocblas_status_memory_error|miopenStatusAllocFailed|ACL_ERROR_RT_MEMORY_ALLOCATION"
    r"|(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_)?(?:MEMORY|RESOURCES)|Cuda failure 2? ?'out of memory'"
    r"|Triton Error \[\w+\]: out of memory|out of memory at line \d+ in file"
)
_BACKENDS: dict[Backend, re.Pattern[str]] = {
    "mps": re.compile(r"\bmps\b|buffer size", re.IGNORECASE),
    "hip": re.compile(r"hip|miopen|rocblas", re.IGNORECASE),
    "xpu": re.compile(r"xpu|\b(?:ur|pi|ze)_", re.IGNORECASE),
    "npu": re.compile(r"npu|\bacl_", re.IGNORECASE),
    "hpu": re.compile(r"hpu|MODULE:", re.IGNORECASE),
    "cuda": re.compile(r"cu(?:da|blas|dnn|solver|sparse|fft)|triton|at line|allocation on device", re.IGNORECASE),
}
_FIELDS = {
    "tried": (
        rf"Tried to allocate {_SIZE}",
        rf"Requested(?: size)? *: {_SIZE}",
        rf"Invalid buffer size: {_SIZE}",
        r"Allocation (?:failed for|of) size ?::([0-9]{1,20})()",
    ),
    "capacity": (
        rf"total capaci?ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"max allowed: {_SIZE}",
        rf"Device limit *: {_SIZE}",
    ),
    "free": (rf"of which {_SIZE} is free", rf"; {_SIZE} free\b", rf"Free \(according to \w+\) *: {_SIZE}"),
    "allowed": (rf"{_SIZE} allowed;", rf"; {_SIZE} allowed\)", rf"user-supplied memory fraction\).{{0,120}}?: {_SIZE}"),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allocated": (
        rf"{_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"MPS allocated: {_SIZE}",
        rf"Currently allocated *: {_SIZE}",
    ),
    "cached": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached\)"),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "other": (rf"other allocations: {_SIZE}",),
}
_PATTERNS = {name: tuple(re.compile(p, re.IGNORECASE) for p in patterns) for name, patterns in _FIELDS.items()}
_DEVICE = re.compile(r"\b[A-Z]{1,4}U +(\d{1,4})\b|on device +(\d{1,4})\b")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_ROUNDED = 0.99  # two figures that differ by less are the same
HIDDEN = 256 << 20  # bytes that nobody accounts for, from which on another process is assumed to hold them


def parse_message(text: str, rank: int | None = None) -> DeviceFailure:
    """The figures of one message, in bytes; what it does not say, or what cannot be, is None."""
    begins = BEGINS.search(text)
    sizes: dict[str, Any] = {name: _first(patterns, text) for name, patterns in _PATTERNS.items()}
    reserved, other = sizes.pop("reserved"), sizes.pop("other")
    if reserved is not None and sizes["allocated"] is not None:
        least = _ROUNDED * sizes["allocated"]  # a total may be rounded below a part of it
        sizes["cached"] = max(0, reserved - sizes["allocated"]) if reserved >= least else None
    _correct(sizes)
    sizes["process"], sizes["others"] = _processes(text, sizes, other or 0)
    device = _DEVICE.search(text)
    start = begins.start() if begins else 0
    ends = [m.end() for patterns in _PATTERNS.values() for p in patterns if (m := p.search(text, start)) is not None]
    return DeviceFailure(
        backend=backend_of(begins[0] if begins else "cuda"),
        rank=rank,
        device=int(device[1] or device[2]) if device else None,
        text=text[start : max(ends, default=start + 200)][:800].strip(),  # without what follows its last figure
        **sizes,
    )


def _correct(sizes: dict[str, Any]) -> None:
    """Call figures unknown that cannot be, given what the device has."""
    capacity, allocated = sizes["capacity"], sizes["allocated"] or 0
    if capacity is None:
        return
    if sizes["cached"] is not None and _ROUNDED * (allocated + sizes["cached"]) > capacity:
        sizes["cached"] = None  # the driver moved the rest to the host's memory, as Windows does
    held = min(capacity, allocated + (sizes["cached"] or 0))
    if sizes["free"] is not None and _ROUNDED * (held + sizes["free"]) > capacity:
        sizes["free"] = None
    if sizes["allowed"] is not None and sizes["allowed"] > capacity:
        sizes["allowed"] = None  # no limit was set


def _processes(text: str, sizes: dict[str, Any], other: int) -> tuple[int | None, int | None]:
    """Bytes of this process and of others.

    In a container a process does not know its own number and calls itself "Process 123": the one whose memory is next
    above what PyTorch holds is this one, and so is the one that comes again where both cannot fit on the device. A
    process cannot hold less than PyTorch does, or more than the device has: then only what all others hold at most is
    known.
    """
    named = [size for match in _PROCESS.finditer(text) if (size := _bytes(match[1], match[2])) is not None]
    process, capacity, free, allocated = (sizes[name] for name in ("process", "capacity", "free", "allocated"))
    reserved = (allocated or 0) + (sizes["cached"] or 0)
    most = _LARGEST if capacity is None else capacity
    impossible = process is not None and not _ROUNDED * reserved <= process <= most
    if impossible:
        process = None
    if process is None and allocated is not None:
        if (process := min((size for size in named if size >= _ROUNDED * reserved), default=None)) is not None:
            named.remove(process)
    elif process is not None and capacity is not None and process + sum(named) > capacity - (free or 0) + HIDDEN:
        again = min(named, key=lambda size: abs(size - process), default=None)
        if again is not None and min(again, process) >= _ROUNDED * max(again, process):
            named.remove(again)
    others = sum(named) + other
    if capacity is not None and free is not None and (process is not None or impossible):
        hidden = capacity - free - (reserved if process is None else process)
        others = max(others, hidden) if hidden >= HIDDEN else others
    if capacity is not None and free is not None:
        others = min(others, max(0, capacity - free - min(capacity, reserved)))
    return process, others or None


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    match = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
    return _bytes(match[1], match[2]) if match is not None else None


def _bytes(number: str, unit: str) -> int | None:
    """PyTorch's sizes count in 1024s, also where older versions write GB; without a unit they are bytes."""
    size = round(float(number) * 1024 ** "bkmgt".index((unit or "b")[0].lower()))
    return size if size < _LARGEST else None


def backend_of(words: str) -> Backend:
    """Whose message it is, by how it begins."""
    for backend, pattern in _BACKENDS.items():
        if pattern.search(words):
            return backend
    return "other"
