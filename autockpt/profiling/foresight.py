"""Ghost runs for hardware that need not be at hand, and the bytes that a step is promised to need there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autockpt.errors import UsageError
from autockpt.profiling.cuda_memory import Allocates, as_seen_by, capability_of, device_peak
from autockpt.schema import DeviceInfo, Graph, Hardware, WorkloadSpec
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.tracing import Tracer

SAFETY = 0.02
"""Share of what a caching allocator is simulated to reserve that a promise adds to it: no model of fragmentation knows
every request that libraries make."""


def torch_device(hardware: Hardware) -> torch.device:
    """The device that a step on this hardware would name. Raises UsageError where this PyTorch does not know it."""
    try:
        return torch.device("cuda" if hardware.kind == "rocm" else hardware.kind)
    except RuntimeError:
        raise UsageError(
            f"this PyTorch does not know {hardware.kind} devices, which {hardware.name} describes one of",
            remedy="Install the package that gives PyTorch this backend.",
        ) from None


def tracer_for(hardware: Hardware, spec: WorkloadSpec, *, fallback: bool = True) -> Tracer:
    """A tracer of the workload with the kernels of the hardware, whose graphs are as its memory sees them.

    Raises what ``Tracer.from_spec`` does.
    """
    return Tracer.from_spec(
        spec,
        device=torch_device(hardware),
        capability=capability_of(hardware),
        fallback=fallback,
        view=lambda graph: as_seen_by(hardware, graph, spec),
    )


@dataclass(frozen=True)
class AtHand:
    """An accelerator that steps are measured on: its allocator is taken to work as CUDA's does."""

    memory_bytes: int
    context_bytes: int
    caches: bool = True


def memory_at_hand(device: DeviceInfo, budget: int | None = None) -> SimulatedMemory | None:
    """What graphs need of an accelerator at hand: whole segments of its allocator, not the bytes of tensors alone.

    None for devices that give tensors what they ask for. ``budget``: bytes that it is kept to (default: all there are).
    What libraries take besides is not known; real steps judge.
    """
    if device.kind in WITHOUT_STREAMS:
        return None
    at_hand = SimulatedMemory(AtHand(device.capacity_bytes, device.overhead_bytes), safety=0.0)
    return at_hand if budget is None else at_hand.within(budget)


def needed_on(device: DeviceInfo) -> Callable[[Graph], int]:
    """Bytes that a ghost run takes of a device at hand, its own overhead included."""
    return memory_at_hand(device) or (lambda graph: graph.peak_bytes + device.overhead_bytes)


def simulated_memory(hardware: Hardware, budget: int | None = None) -> SimulatedMemory:
    """What graphs of ``tracer_for`` need of the device within ``budget`` bytes (default: all there are)."""
    return SimulatedMemory(hardware, None if budget is None else min(budget, hardware.memory_bytes))


@dataclass(frozen=True)
class SimulatedMemory:
    """Bytes that a step is promised to take of a device, context included: reserved ones, and a share for safety.

    An allocator that is kept to ``most`` bytes (None: to what the device has) gives cached segments back before it
    fails, so a plan may fit that would reserve more if it could.
    """

    hardware: Allocates
    most: int | None = None
    safety: float = SAFETY

    def __call__(self, graph: Graph) -> int:
        """The promise for a ghost run; more than ``most`` where it cannot be kept to that."""
        context, share = self.hardware.context_bytes, self._share
        most = self.hardware.memory_bytes if self.most is None else self.most
        limit = context + int((most - context) / (1 + share))
        peak = device_peak(self.hardware, graph, limit=limit)
        return peak.total + int(share * peak.reserved)

    def least(self, graph: Graph, promised: int) -> int:
        """How much of a promise cannot be given back: what plans near this one are judged by."""
        if self.most is None or promised > self.most:
            return promised
        return min(promised, self.hardware.context_bytes + int(graph.peak_bytes * (1 + self._share)))

    def within(self, budget: int) -> SimulatedMemory:
        """The same for an allocator that is kept to ``budget`` bytes."""
        return replace(self, most=min(budget, self.hardware.memory_bytes))

    @property
    def _share(self) -> float:
        return self.safety if self.hardware.caches else 0.0


def said_of(hardware: Hardware) -> str:
    """What is in a ``SimulatedMemory``, for people."""
    if not hardware.caches:
        return "bytes are those that tensors hold"
    return (
        "peaks are what a caching allocator kept to the budget would reserve, fragmentation included, with the context "
        f"of {hardware.context_bytes / 1e6:.0f} MB, and {SAFETY:.0%} for safety"
    )
