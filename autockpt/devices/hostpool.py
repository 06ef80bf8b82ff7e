"""Host memory for offloaded activations: exact sizes, used again from step to step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

AREA_BYTES = 64 << 20  # pieces are cut from areas of at least this size
_ALIGN = 64


@dataclass
class _Area:
    memory: torch.Tensor
    used: int = 0
    pieces: int = 0


@dataclass
class Piece:
    """``memory``: 1-D uint8 host tensor of the exact size asked for. ``ready``: event after which it may be written."""

    memory: torch.Tensor
    area: _Area
    ready: Any = None


class Pool:
    """Pieces of host memory of exact sizes, cut from larger areas and used again.

    ``allocate(nbytes)`` makes an area, ``area_bytes(nbytes, held)`` says how large one should be for a piece of
    ``nbytes`` when ``held`` bytes exist already. Sizes that no longer occur are given up before more is allocated.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], area_bytes: Callable[[int, int], int]) -> None:
        self._allocate = allocate
        self._area_bytes = area_bytes
        self._areas: list[_Area] = []
        self._free: defaultdict[int, list[Piece]] = defaultdict(list)
        self._returned: deque[Piece] = deque()  # appended to by finalisers, at any moment and in any thread

    @property
    def held_bytes(self) -> int:
        """Bytes of all areas, in use or not."""
        return sum(a.memory.numel() for a in self._areas)

    def take(self, nbytes: int) -> Piece:
        """A piece of exactly ``nbytes``."""
        self._sort_returned()
        if self._free[nbytes]:
            piece = self._free[nbytes].pop()
            piece.area.pieces += 1
            return piece
        area = self._area_with_room(nbytes)
        piece = Piece(area.memory[area.used : area.used + nbytes], area)
        area.used += -(-nbytes // _ALIGN) * _ALIGN
        area.pieces += 1
        return piece

    def give(self, piece: Piece) -> None:
        """Take a piece back. Safe in finalisers."""
        self._returned.append(piece)

    def _sort_returned(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            piece.area.pieces -= 1
            self._free[piece.memory.numel()].append(piece)

    def _area_with_room(self, nbytes: int) -> _Area:
        for area in self._areas:
            if area.memory.numel() - area.used >= nbytes:
                return area
        self._drop_idle()
        area = _Area(self._allocate(max(nbytes, self._area_bytes(nbytes, self.held_bytes))))
        self._areas.append(area)
        return area

    def _drop_idle(self) -> None:
        """Give up areas that nothing is in: their sizes were those of other steps."""
        idle = [a for a in self._areas if not a.pieces]
        if not idle:
            return
        self._areas = [a for a in self._areas if a.pieces]
        for size, pieces in list(self._free.items()):
            self._free[size] = [p for p in pieces if p.area.pieces]
