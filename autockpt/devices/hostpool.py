"""Memory below the device for offloaded activations: exact sizes, used again from step to step, within a bound."""

from __future__ import annotations

import mmap
import os
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from autockpt.errors import HostBudgetExceeded
from autockpt.schema.sizes import format_bytes

AREA_BYTES = 64 << 20  # pieces are cut from areas of at least this size
DEDICATED_BYTES = 8 << 20  # pinned pieces from this size on get an area of their own, so that little is left over
_ALIGN = 64

AreaBytes = Callable[[int, int], int]
"""How large an area should be, for a piece of so many bytes, when so many exist already."""


def pinned_area(nbytes: int, held: int) -> int:
    """Areas of pinned memory: dear to have, so large pieces get exactly what they need."""
    return nbytes if nbytes >= DEDICATED_BYTES else AREA_BYTES


def file_area(nbytes: int, held: int) -> int:
    """Areas of files: each holds a file descriptor, of which there are few, so they grow in large steps."""
    return max(AREA_BYTES, 4 * nbytes, held // 4)


def whole_pages(nbytes: int) -> int:
    """Rounded up to whole pages, as all areas are."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


M = TypeVar("M")
"""What areas are made of: a 1-D uint8 tensor, a part of a file, or a range, which is numbers alone. Can be sliced."""


class HostUse:
    """Bytes that offloading claims on the host, over all pools that share this, and the most of them so far.

    ``limit`` is a real bound: pools do not grow beyond it. ``on_paper``, for predictions, they are told what would be
    held instead; areas beyond the limit are no larger than they must be, as those within it are.
    """

    def __init__(self, limit: int | None = None, *, on_paper: bool = False) -> None:
        self.limit, self._on_paper = limit, on_paper
        self.bytes = self.peak = 0

    def fitting(self, needed: int, wanted: int) -> int:
        """How many bytes, between the two, may be claimed. Raises HostBudgetExceeded where not even ``needed`` may."""
        if self.limit is None:
            return wanted
        left = self.limit - self.bytes
        if needed > left and not self._on_paper:
            raise HostBudgetExceeded(
                f"offloading needs {format_bytes(needed)} of host memory more than the {format_bytes(self.bytes)} "
                f"that it holds: over the host budget of {format_bytes(self.limit)}",
            )
        return max(needed, min(wanted, left // mmap.PAGESIZE * mmap.PAGESIZE))

    def claim(self, nbytes: int) -> None:
        """So many bytes more, or less, are held."""
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)


@dataclass
class _Area(Generic[M]):
    memory: M
    nbytes: int
    used: int = 0
    pieces: int = 0
    ours: bool = True  # not a parent process's


@dataclass
class Piece(Generic[M]):
    """``memory``: room of the exact size asked for. ``ready``: event after which it may be written."""

    memory: M
    nbytes: int
    area: _Area[M]
    ready: Any = None


class Pool(Generic[M]):
    """Pieces of exact sizes, cut from larger areas and used again.

    ``allocate(nbytes)`` makes an area of whole pages, ``area_bytes`` says how large one should be.
    Sizes that no longer occur are given up before more is allocated. Where sizes vary from step to step, as of batches
    that are padded to their longest sequence, one area holds them all, and is cut up again whenever nothing is in it;
    ``moment`` gives an event after all that reads from it by then. ``use``, shared among pools, is told of all that is
    held, and bounds it. Raises HostBudgetExceeded from ``take`` where it does.
    """

    def __init__(
        self,
        allocate: Callable[[int], M],
        area_bytes: AreaBytes,
        use: HostUse | None = None,
        align: int = _ALIGN,
        moment: Callable[[], Any] = lambda: None,
    ) -> None:
        self._allocate = allocate
        self._area_bytes = area_bytes
        self._use = use or HostUse()
        self._align = align
        self._moment = moment
        self._areas: list[_Area[M]] = []
        self._free: defaultdict[int, list[Piece[M]]] = defaultdict(list)
        self._returned: deque[Piece[M]] = deque()  # appended to by finalisers, at any moment and in any thread
        self._process = os.getpid()
        self._varies = False
        self._cut: Any = None  # event after which pieces that are new may be written

    @property
    def held_bytes(self) -> int:
        """Bytes of all areas, in use or not."""
        return sum(area.nbytes for area in self._areas)

    def take(self, nbytes: int) -> Piece[M]:
        """A piece of exactly ``nbytes``."""
        if self._process != os.getpid():
            self._leave_to_parent()
        self._sort_returned()
        begins = bool(self._areas) and not any(area.pieces for area in self._areas)
        if begins and (self._varies or not self._free[nbytes]):
            self._cut_again()
        if self._free[nbytes]:
            piece = self._free[nbytes].pop()
            piece.area.pieces += 1
            return piece
        area = self._area_with_room(nbytes)
        memory: Any = area.memory
        piece = Piece(memory[area.used : area.used + nbytes], nbytes, area, self._cut)
        area.used += -(-max(nbytes, 1) // self._align) * self._align
        area.pieces += 1
        return piece

    def give(self, piece: Piece[M]) -> None:
        """Take a piece back. Safe in finalisers."""
        self._returned.append(piece)

    def _sort_returned(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            piece.area.pieces -= 1
            if piece.area.ours:
                self._free[piece.nbytes].append(piece)

    def _leave_to_parent(self) -> None:
        """This process was forked: the files that are mapped are those of its parent, and of others like it."""
        self._process = os.getpid()
        self._use.claim(-self.held_bytes)
        for area in self._areas:
            area.ours = False
        self._areas, self._free = [], defaultdict(list)

    def _area_with_room(self, nbytes: int) -> _Area[M]:
        if (area := self._with_room(nbytes)) is not None:
            return area
        idle = [area for area in self._areas if not area.pieces]
        self._empty(idle)
        if (area := self._with_room(nbytes)) is not None:
            return area
        self._give_up(idle)
        return self._new_area(nbytes, self._area_bytes(nbytes, self.held_bytes))

    def _with_room(self, nbytes: int) -> _Area[M] | None:
        return next((area for area in self._areas if area.nbytes - area.used >= nbytes), None)

    def _cut_again(self) -> None:
        """Nothing is in use: what there is becomes one area, in which a step of any sizes finds room without gaps."""
        together, grown = self.held_bytes, self._varies
        self._empty(self._areas)
        if len(self._areas) > 1:
            self._give_up(self._areas)
            self._new_area(together, together + together // 8 * grown)  # the longest so far may not be the longest

    def _empty(self, idle: list[_Area[M]]) -> None:
        """Forget how areas that nothing is in were cut: that was for the sizes of other steps."""
        if idle:
            self._varies, self._cut = True, self._moment()
        for area in idle:
            area.used = 0
        left = {size: [piece for piece in pieces if piece.area.pieces] for size, pieces in self._free.items()}
        # not those of every size that there ever was: this runs in every step where they vary
        self._free = defaultdict(list, {size: pieces for size, pieces in left.items() if pieces})

    def _give_up(self, idle: list[_Area[M]]) -> None:
        self._use.claim(-sum(area.nbytes for area in idle))
        self._areas = [area for area in self._areas if area.pieces]

    def _new_area(self, needed: int, wanted: int) -> _Area[M]:
        size = self._use.fitting(whole_pages(needed), whole_pages(max(needed, wanted)))
        area = _Area(self._allocate(size), size)
        self._use.claim(size)
        self._areas.append(area)
        return area
