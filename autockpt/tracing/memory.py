"""Reserved address space that ghost tensors point into: storages of any size that occupy no memory."""

from __future__ import annotations

import gc
import mmap
import sys
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from autockpt.errors import GhostError

# Largest first; what a system grants depends on its page tables, limits (`ulimit -v`) and sandbox.
_SIZES = tuple(1 << bits for bits in (46, 44, 42, 40, 38))
_ALIGNMENT = 64
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0x40)
_construct: Any = torch._C._construct_storage_from_data_pointer  # type: ignore[attr-defined]
_CPU = torch.device("cpu")


class GhostMemory:
    """A private mapping that is never written to, handed out as storages.

    Read-only by default: a kernel that writes to it kills the process, so that a slip cannot go unnoticed; for a
    process that may die. With ``writable`` a slip takes real pages, and changes nothing of what is recorded. An address
    is handed out again only after ``release``, and as late as possible, so that nothing that matches by address is
    fooled. Raises GhostError where the system grants no address space.
    """

    def __init__(self, *, writable: bool = False, size: int | None = None) -> None:
        self._mapping = _reserve(writable, _SIZES if size is None else (size,))
        with warnings.catch_warnings(action="ignore"):  # "The given buffer is not writable": nor is it meant to be
            self._whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.base, self.size = self._whole.data_ptr(), len(self._mapping)
        self.end = self.base + self.size
        self._next = self.base
        self._limit = self.end
        self._gaps: list[tuple[int, int]] = []  # free ranges still to be used in this round, last one next
        self._live: dict[int, int] = {}  # address -> bytes, padded

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A CPU storage of ``nbytes`` whose bytes must not be accessed. Raises GhostError when the range is full."""
        padded = max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT
        address = self._next
        while address + padded > self._limit:
            address = self._next_gap(padded)
        self._next = address + padded
        self._live[address] = padded
        return _construct(address, _CPU, nbytes)

    def release(self, address: int) -> None:
        """Say that no tensor uses the storage at ``address`` any more."""
        self._live.pop(address, None)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is a ghost of this memory."""
        return self.base <= tensor.data_ptr() < self.end

    def _next_gap(self, padded: int) -> int:
        """Go on to the next free range; at the last one begin a new round over what has become free."""
        if not self._gaps:
            self._gaps = self._free_ranges()
            if not any(end - start >= padded for start, end in self._gaps):
                raise GhostError(
                    f"the ghost run's address space of {self.size} bytes is full",
                    remedy="Raise the limit on address space (`ulimit -v`).",
                )
        self._next, self._limit = self._gaps.pop()
        return self._next

    def _free_ranges(self) -> list[tuple[int, int]]:
        ranges = []
        start = self.base
        for address in sorted(self._live):
            if address > start:
                ranges.append((start, address))
            start = address + self._live[address]
        if start < self.end:
            ranges.append((start, self.end))
        return ranges[::-1]


def _reserve(writable: bool, sizes: tuple[int, ...]) -> mmap.mmap:
    if sys.platform == "win32":
        raise GhostError("ghost runs need POSIX memory mappings")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    for _ in range(2):
        for size in sizes:
            with suppress(OSError, OverflowError, ValueError):
                return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot=protection)
        gc.collect()  # cycles may hold what earlier ghost runs reserved
    raise GhostError(
        "the system grants no address space for a ghost run",
        remedy="Raise the limit on address space (`ulimit -v`, vm.overcommit_memory).",
    )
