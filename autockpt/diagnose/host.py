"""When it was the host's memory that ran out: what a log then has, and what helps."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autockpt.schema.diagnosis import HostFailure, HostKind

HOST_MARKERS = (
    "DefaultCPUAllocator",
    "killed by signal",
    "exitcode: -9",
    "exitcode  : -9",
    "exit code 137",
    "SIGKILL",
    "oom-kill",
    "oom_kill",
    "Killed process",
    "MemoryError",
    "bad_alloc",
    "OOMKilled",
    "OOM killer",
    "running low on memory",
    "Unable to allocate",
    "shared memory",
    "Cannot allocate memory",
    "Killed",
)
# most telling first
_PATTERNS: tuple[tuple[HostKind, re.Pattern[str]], ...] = (
    ("shared_memory", re.compile(r"killed by signal: Bus error|insufficient shared memory|out of shared memory", re.I)),
    ("worker", re.compile(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\)? (?:is killed by signal: Killed|exited unexp)")),
    (
        "allocator",
        re.compile(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|\bMemoryError\b(?!\s*as)"
            r"|Unable to allocate [\d.]+ [KMGT]iB|[Cc]annot allocate memory|std::bad_alloc"
        ),
    ),
    (
        "killed",
        re.compile(
            r"exit ?code *: -9\b|exit code:? *137|OOMKilled|killed by the OOM killer"
            r"|node running low on memory|Signal 9 \(SIGKILL\)|\(SIGKILL\)|died with <Signals\.SIGKILL"
            r"|oom[-_]kill|Out of memory: Killed process|Killed process \d+|^\s*(?:\S+: line \d+: *\d+ )?Killed\b",
            re.I,
        ),
    ),
)
_TRIED = re.compile(r"(?:you tried to allocate|unable to mmap) (\d{1,20}) bytes")
_ARRAY = re.compile(r"Unable to allocate ([\d.]{1,12}) ([KMGT])iB")

ADVICE: dict[HostKind, tuple[str, ...]] = {
    "killed": (
        "The operating system ended the process for want of main memory; a plan for the device does not change that.",
        "Load the weights once and straight to the device (`device_map`, `low_cpu_mem_usage`), on several ranks only "
        "on the first or from memory-mapped safetensors; preprocess data ahead, into memory-mapped files.",
        "Where a plan offloads: give --host-budget, or let part of it go to disk (`{kind: offload, tier: disk}`).",
        "In a container or batch job: raise its memory limit (`--memory`, `--mem`), and see `dmesg` for who was ended.",
    ),
    "worker": (
        "A worker of the DataLoader was ended for want of main memory: each holds its copy of what the data set has in "
        "Python objects, and prefetch_factor batches.",
        "Fewer workers (`num_workers=2`), `prefetch_factor=1`, `pin_memory=False`; data as arrays or memory-mapped "
        "files in place of lists and dicts.",
        "In a container or batch job: raise its memory limit. A plan for the device does not change any of it.",
    ),
    "allocator": (
        "The host's memory could not hold a tensor that was made on the CPU; a plan for the device does not change "
        "that.",
        "Make it on the device, or in smaller parts: load weights with `device_map` or from memory-mapped safetensors, "
        "and look for a batch or logits that are moved to the CPU to be kept (evaluation: `eval_accumulation_steps`, "
        "`preprocess_logits_for_metrics`).",
        "Where the step itself runs on the CPU, `autockpt search --device cpu --budget SIZE` finds a plan for it.",
    ),
    "shared_memory": (
        "Shared memory (/dev/shm) ran out, through which DataLoader workers hand over batches.",
        "Give the container more: `docker run --shm-size=16g` or `--ipc=host`; or `num_workers=0`; or "
        "`torch.multiprocessing.set_sharing_strategy('file_system')`.",
    ),
}


def host_failure(lines: Sequence[str], rank: int | None = None) -> HostFailure | None:
    """The most telling sign, from the end, that the host's memory ran out; None where there is none."""
    for kind, pattern in _PATTERNS:
        for line in reversed(lines):
            if pattern.search(line):
                return HostFailure(kind=kind, tried=_tried(line), rank=rank, text=line.strip()[:500])
    return None


def _tried(line: str) -> int | None:
    size = None
    if (match := _TRIED.search(line)) is not None:
        size = int(match[1])
    elif (match := _ARRAY.search(line)) is not None and match[1].count(".") <= 1 and match[1] != ".":
        size = round(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))
    return size if size is not None and size < 2**60 else None
