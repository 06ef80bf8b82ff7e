"""How much memory the host has for this process: physical memory, narrowed by control groups. Linux; bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as a number near 2**63; nothing real is that large.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class HostMemory:
    """Reads /proc and the control groups; the roots can be replaced in tests. What is unknown falls back on less."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

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
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


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
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if len(parts) == 2 and parts[1] == "kB" and parts[0].isdigit():
            found[name] = int(parts[0]) * 1024
    return found
