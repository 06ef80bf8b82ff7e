"""A few elements of a tensor in the host's memory, read when it is dropped and compared with what is made in its place.

What a unit does otherwise than it did when it was recorded (another number, another branch) changes nearly all that is
computed after it. A change of few elements passes; the next recording of the unit finds it. Reading takes half a
microsecond. On an accelerator it would take a kernel.
"""

from __future__ import annotations

from ctypes import string_at
from typing import NamedTuple

import torch

ELEMENTS = 8


class Place(NamedTuple):
    """Neighbouring elements in the middle of a tensor: bytes from its beginning, and how many."""

    offset: int
    length: int


def place_in(size: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Place | None:
    """Where to read a tensor that lies so; None where it has no elements, or they are no numbers with a fraction."""
    if not dtype.is_floating_point or 0 in size:
        return None
    if not size:
        return Place(0, dtype.itemsize)
    run = min(ELEMENTS, size[-1]) if strides[-1] == 1 else 1
    first = sum(length // 2 * stride for length, stride in zip(size[:-1], strides[:-1], strict=True))
    return Place((first + (size[-1] - run) // 2 * strides[-1]) * dtype.itemsize, run * dtype.itemsize)


def read(tensor: torch.Tensor, place: Place) -> bytes:
    """What a tensor on the CPU holds there."""
    return string_at(tensor.data_ptr() + place.offset, place.length)
