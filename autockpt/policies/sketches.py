"""How far two tensors are apart, told from a few numbers of each: for gradients in different processes, and on devices
whose kernels need not repeat themselves bit by bit.

A count sketch (Charikar, Chen, Farach-Colton 2002): every element gets a random sign and goes into one of a few sums.
The sketch of a difference is the difference of sketches, and its squared length is that of the tensor on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autockpt.policies.arguments import tensors_of
from autockpt.policies.fingerprints import quietly

SUMS = 64
"""The length of a difference is known to about 1 / sqrt(2 · SUMS): 9 %."""
_AT_A_TIME = SUMS << 14

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far apart, relative to its length, a gradient may be for another order of sums, by the coarsest type in use."""
SMALL = 1e-3
"""Gradients this many times shorter than the longest are mostly rounding: their error is taken relative to that."""


def sketch(tensor: Tensor) -> tuple[float, ...]:
    """The sums of a tensor's elements in double precision, the same signs every time. Memory: 16 MiB at most."""
    return tuple(sums(tensor).tolist())


def sums(tensor: Tensor) -> Tensor:
    """The same on the tensor's device, where nothing is read."""
    flat = tensor.detach().reshape(-1)
    generator = torch.Generator(device=flat.device).manual_seed(20)
    total = torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _AT_A_TIME):
        part = flat[start : start + _AT_A_TIME].double()
        signs = torch.empty_like(part).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        signed = nn.functional.pad(part * signs, (0, -part.numel() % SUMS))
        total += signed.view(-1, SUMS).sum(0)
    return total


def unseen_sums(tensor: Tensor) -> Tensor:
    """The same, and no dispatch mode sees it: ``remake`` would hold the tensor's elements for ops of the unit's own."""
    with quietly(), torch._C.DisableTorchFunction():
        return sums(tensor)


def distance_of(first: torch.Tensor, second: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """How far two sketches are apart, relative to the length of the first. What is in both alike, NaN too, is not."""
    with quietly(), torch._C.DisableTorchFunction():
        alike = (first == second) | (first.isnan() & second.isnan())
        apart = torch.where(alike, 0.0, first - second).norm(dim=dim)
        away = torch.where(apart == 0.0, 0.0, apart / first.norm(dim=dim))
        return torch.where(away.isnan(), torch.inf, away)


def repeats(device: torch.device) -> bool:
    """Whether a device's kernels repeat themselves bit by bit: on accelerators only deterministic ones surely do."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest distance of two sketches of this type, relative to their length, that counts as rounding."""
    return TOLERANCE.get(str(dtype).removeprefix("torch."), TOLERANCE["bfloat16"])


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
