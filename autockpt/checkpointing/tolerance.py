"""How far apart two tensors may be where kernels do not repeat themselves bit by bit, as on accelerators.

A count sketch (Charikar, Chen, Farach-Colton 2002) stands for each tensor: every element gets a random sign and is
added to one of a few sums. The sketch of a difference is the difference of the sketches, and on average its squared
length is that of the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autockpt.checkpointing.fingerprint import quietly

SUMS = 64
"""The length of a difference is known to about 1 / sqrt(2 · SUMS): 9 %."""
_AT_A_TIME = SUMS << 14

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far apart, relative to its length, a gradient may be for another order of sums, by the coarsest type in use."""


def sums(tensor: Tensor) -> Tensor:
    """The same on the tensor's device, where nothing is read. No mode sees it: ``remake`` would hold the tensor's
    elements for ops of the unit's own."""
    with quietly():
        return _sums(tensor)


def _sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    generator = torch.Generator(device=flat.device).manual_seed(20)
    total = torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _AT_A_TIME):
        part = flat[start : start + _AT_A_TIME].double()
        signs = torch.empty_like(part).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        signed = nn.functional.pad(part * signs, (0, -part.numel() % SUMS))
        total += signed.view(-1, SUMS).sum(0)
    return total


def distance_of(first: torch.Tensor, second: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """How far two sketches are apart, relative to the length of the first. What is in both alike, NaN too, is not."""
    with quietly():
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
