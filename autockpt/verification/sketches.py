"""How far two tensors are apart, told from a few numbers of each: for gradients in different processes, and on devices
whose kernels need not repeat themselves bit by bit.

A count sketch (Charikar, Chen, Farach-Colton 2002): every element gets a random sign and goes into one of a few sums.
The sketch of a difference is the difference of sketches, and its squared length is that of the tensor on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autockpt.checkpointing.arguments import tensors_of
from autockpt.checkpointing.tolerance import TOLERANCE, sums

SMALL = 1e-3
"""Gradients this many times shorter than the longest are mostly rounding: their error is taken relative to that."""


def sketch(tensor: Tensor) -> tuple[float, ...]:
    """The sums of a tensor's elements in double precision, the same signs every time. Memory: 16 MiB at most."""
    return tuple(sums(tensor).tolist())


def length(sums: Sequence[float]) -> float:
    """The length of the tensor that was sketched, about."""
    return math.sqrt(sum(s * s for s in sums))


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The length of the difference of two sketched tensors, about. NaN and infinite where either is in one alone."""
    pairs = list(zip(first, second, strict=True))
    return length([0.0 if a == b or (a != a and b != b) else a - b for a, b in pairs])


@contextmanager
def coarsest_type(model: nn.Module) -> Iterator[list[str]]:
    """Collects the floating point types that the model's modules give out; ``coarsest`` picks one."""
    found = list({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})

    def note(_: nn.Module, __: object, output: object) -> None:
        for tensor in tensors_of(output):
            if tensor.is_floating_point() and (name := str(tensor.dtype)[6:]) not in found:
                found.append(name)

    handle = register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def coarsest(types: Sequence[str]) -> str:
    """The type with the largest tolerance; one that has none, such as fp8, counts as bfloat16."""
    known = [t if t in TOLERANCE else "bfloat16" for t in types]
    return max(known, key=TOLERANCE.__getitem__, default="float32")
