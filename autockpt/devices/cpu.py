"""The CPU as a training device: exact peak bytes from the allocator's own events, no real limit.

How much memory the host has for this process: physical memory, narrowed by control groups. Linux; bytes.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.autograd.profiler import profile

from autockpt.devices.base import Peak
from autockpt.schema.device import DeviceInfo

# Version 1 writes "no limit" as a number near 2**63; nothing real is that large.
_UNLIMITED = 1 << 60


def _limits(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[tuple[int, int]]:
    """From the group up to the root: any ancestor's limit holds too. Inside a container only the root exists."""
    group = root / path.strip("/")
    while True:
        limit = _number(group / limit_name)
        if limit is not None and limit < _UNLIMITED:
            used = (_number(group / usage_name) or 0) - _reclaimable(group)
            yield limit, max(0, used)
        if group == root or root not in group.parents:
            return
        group = group.parent


def _reclaimable(group: Path) -> int:
    """Page cache that counts as used but is given back on demand."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found is not None else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """``Name:  123 kB`` lines as bytes."""
    lines = re.finditer(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)
    return {line[1]: int(line[2]) * 1024 for line in lines}


# glibc hands memory above some thresholds back to the system, and thresholds move: a plan's steps then take page faults
# by what ran before it, up to a sixth of the step time. Told to keep memory, equal steps take equal time.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 46), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

_OUT_OF_MEMORY = ("can't allocate memory", "DefaultCPUAllocator: not enough memory", "bad_alloc")


@dataclass(eq=False)
class CpuDevice:
    """Host memory and host clocks. Memory is read from /proc and the control groups, whose roots can be replaced in
    tests; what is unknown falls back on less.

    The peak is what PyTorch's CPU allocator held. Not in it: memory-mapped files (what the offload choice writes to,
    and mapped weights, unless the caller counts their storages as resident), and scratch memory that math libraries
    allocate for themselves. There is no way to limit the allocator, so budgets are compared with the peak after
    measuring.
    """

    kind = "cpu"
    torch_device = torch.device("cpu")
    keeps_memory = False
    environment: ClassVar[Mapping[str, str]] = KEEP_MEMORY
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

    def identity(self) -> str:
        """The host, and the cores that this process may run on."""
        cores = getattr(os, "sched_getaffinity", lambda _: ())(0)  # not on macOS
        return f"{socket.gethostname()}-cpu-{hashlib.sha256(str(sorted(cores)).encode()).hexdigest()[:8]}"

    def describe(self) -> DeviceInfo:
        """Processor name, memory and intra-op threads."""
        return DeviceInfo(
            kind=self.kind, name=_processor(), capacity_bytes=self.capacity(), threads=torch.get_num_threads()
        )

    def capacity(self) -> int:
        """Physical memory, or the least limit of the control groups this process is in, if that is smaller."""
        return min([self._physical(), *(limit for limit, _ in self._groups())])

    def free(self) -> int:
        """What could still be allocated: available memory, and no more than is left under any control group's limit."""
        available = self._meminfo().get("MemAvailable", self._physical())
        return max(0, min([available, *(limit - used for limit, used in self._groups())]))

    def own(self) -> int:
        """Anonymous memory that this process holds; file pages are not counted, since the system can drop them."""
        fields = _fields(self.proc / "self" / "status")
        return fields.get("RssAnon", fields.get("VmRSS", 0))

    def used_by_others(self) -> int:
        """Bytes of the capacity that are neither free nor this process's own."""
        return max(0, self.capacity() - self.free() - self.own())

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def measure_peak(self, fn: Callable[[], None], resident: int) -> Peak:
        """Run ``fn`` once under the profiler's memory events and add ``resident`` bytes, exact to the byte.

        Blocks that are alive before ``fn`` begins and that it releases are never reported by the profiler, so they
        count to the end: nothing but ``resident`` should be alive, gradients least of all. Work that ``fn`` gives to
        threads of its own is not seen. Whatever ``fn`` raises is passed on.
        """
        gc.collect()
        return Peak(resident + allocator_peak(fn))

    def time(self, fn: Callable[[], None]) -> float:
        """Wall seconds of ``fn``. With one thread those are left out in which it waited for a core that others used."""
        waited, worked = waited_for_core(), time.thread_time()
        start = time.perf_counter()
        fn()
        seconds = time.perf_counter() - start
        worked = time.thread_time() - worked
        if waited is None:
            return seconds
        # waiting just before or after the step may be counted in; what the thread worked is the least it can have taken
        return max(seconds - ((waited_for_core() or waited) - waited), worked)

    def out_of_memory(self, error: BaseException) -> bool:
        """MemoryError, an allocation that the allocator could not serve, or a mapping that did not fit."""
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError):
            return error.errno == errno.ENOMEM
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)

    def release(self) -> None:
        """Collect garbage; the allocator keeps no cache of its own."""
        gc.collect()

    def limit(self, budget_bytes: int | None) -> AbstractContextManager[None]:
        """No real limit exists on the CPU: whoever holds a budget compares it with the measured peak."""
        return nullcontext()

    def _physical(self) -> int:
        total = self._meminfo().get("MemTotal")
        return total if total is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _meminfo(self) -> dict[str, int]:
        return _fields(self.proc / "meminfo")

    def _groups(self) -> Iterator[tuple[int, int]]:
        """(limit, used) of every control group with a memory limit around this process, both hierarchy versions."""
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                for root in (self.cgroup, self.cgroup / "unified"):
                    yield from _limits(root, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                root = self.cgroup / "memory"
                yield from _limits(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def waited_for_core() -> float | None:
    """Seconds that this thread was ready to run and another had its core, by Linux's scheduler statistics.

    None with several threads, of which the last to come decides, and where the system does not tell. Waiting for a disk
    is not in it.
    """
    if torch.get_num_threads() != 1:
        return None
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def allocator_peak(fn: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's CPU allocator handed out during ``fn`` and held at once; older blocks count not."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once: its library prints two lines on the terminal per use
    with profile(use_kineto=True, use_cpu=True, profile_memory=True) as recorded:
        fn()
    return peak_of(_allocations(recorded))


def peak_of(events: Iterable[tuple[int, int]]) -> int:
    """The most bytes alive at once, from (address, bytes) in order; negative bytes are a release.

    Only blocks whose allocation is among the events are followed. The release of any other is worth nothing: the
    profiler leaves it out, or takes its size from a table that an earlier recording left behind.
    """
    alive: dict[int, int] = {}
    current = peak = 0
    for address, size in events:
        if size > 0:
            current += size - alive.get(address, 0)
            alive[address] = size
            peak = max(peak, current)
        else:
            current -= alive.pop(address, 0)
    return peak


def _allocations(recorded: Any) -> list[tuple[int, int]]:
    """(address, bytes) of every CPU allocation and release, in order of time."""
    # Not at the top: the module's place is private, and only this function needs it.
    from torch._C._profiler import _EventType

    found: list[tuple[int, int, int]] = []
    open_events = list(recorded.kineto_results.experimental_event_tree())
    while open_events:
        event = open_events.pop()
        open_events.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda item: item[0])]


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return (found and found[1]) or platform.processor() or platform.machine() or "CPU"
