"""Pairs of fingerprints and of sketches, compared on their device and read by the host all at once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from autockpt.policies.fingerprints import quietly


class Compared(NamedTuple):
    """Two fingerprints of what should be one and the same; sketches where a device need not repeat itself."""

    what: str
    expected: torch.Tensor
    found: torch.Tensor
    distance: torch.Tensor | None = None
    tolerance: float | None = None


def read(compared: list[Compared]) -> list[tuple[bool, float]]:
    """Whether each pair is equal, and how far its sketches are apart; one read per device."""
    result: list[tuple[bool, float]] = [(True, 0.0)] * len(compared)
    places: dict[torch.device, list[int]] = {}
    for place, pair in enumerate(compared):
        places.setdefault(pair.found.device, []).append(place)
    with quietly(), torch._C.DisableTorchFunction(), torch.no_grad():
        for device, found in places.items():
            pairs = [compared[place] for place in found]
            same = torch.stack([p.expected for p in pairs]) == torch.stack([p.found for p in pairs])
            if any(p.distance is not None for p in pairs):
                nothing = torch.zeros((), dtype=torch.float64, device=device)
                away = torch.stack([nothing if p.distance is None else p.distance for p in pairs])
                values = torch.stack([same.double(), away]).tolist()
            else:
                values = [same.tolist(), [0.0] * len(pairs)]
            for place, equal, far in zip(found, *values, strict=True):
                result[place] = bool(equal), far
    return result


def distance_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How far two sketches are apart, relative to the length of the first. What is in both alike, NaN too, is not."""
    with quietly(), torch._C.DisableTorchFunction():
        alike = (first == second) | (first.isnan() & second.isnan())
        away = torch.where(alike, 0.0, first - second).norm() / first.norm()
        return torch.where(away.isnan(), torch.inf, away)
