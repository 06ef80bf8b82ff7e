"""Transports that offload tensors, by device and tier: pinned host memory or a file for accelerators with streams, a
memory-mapped file where the device is the CPU itself or has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from autockpt.devices.base import Transport
from autockpt.devices.cpu import CpuDevice
from autockpt.devices.disk import CpuTransport, DiskTransport, staging_bytes
from autockpt.devices.hostpool import AreaBytes, HostUse, Piece, Pool, file_area, pinned_area
from autockpt.devices.streams import AcceleratorQueues, CudaQueues, StreamTransport
from autockpt.errors import MeasurementError
from autockpt.schema.device import WITHOUT_STREAMS, Environment
from autockpt.schema.graph import Copy, Tier
from autockpt.schema.sizes import format_binary

_STEPS = 4  # until pools have found their form, where sizes come and go within a step
Transports = Callable[[torch.device, Tier], Transport]
"""The transport of a device into a tier. Raises MeasurementError for a kind of device that has none."""


def transport_for(device: torch.device | str, tier: Tier = "cpu", use: HostUse | None = None) -> Transport:
    """A new transport for one device; ``use`` is told of, and bounds, what it claims on the host.

    On the CPU, and on devices without streams, both tiers are a memory-mapped file. Raises MeasurementError for a kind
    of device that has none.
    """
    device = torch.device(device)
    if device.type in WITHOUT_STREAMS:
        return CpuTransport(use=use)
    queues = _queues(device)
    return DiskTransport(queues, use=use) if tier == "disk" else StreamTransport(queues, use)


def _queues(device: torch.device) -> AcceleratorQueues:
    if device.type == "cuda":
        return CudaQueues(device)
    there = torch.accelerator.current_accelerator()
    if there is None or there.type != device.type:
        raise MeasurementError(
            f"nothing is known about moving activations off a {device.type} device",
            remedy="Use plans without offload there.",
        )
    try:
        return AcceleratorQueues(device)
    except (RuntimeError, NotImplementedError) as error:
        raise MeasurementError(
            f"PyTorch's {device.type} backend gives no streams to move activations by: {str(error).splitlines()[0]}",
            remedy="Use plans without offload there.",
        ) from None


class OffloadTransports:
    """The usual transports of all devices, which together stay within one host budget (bytes; None: no bound).

    ``use`` tells what they claim. A copy or a pickle begins with nothing, under the same budget.
    """

    def __init__(self, host_budget: int | None = None) -> None:
        self.use = HostUse(host_budget)
        self._file: Transport | None = None

    def __call__(self, device: torch.device, tier: Tier) -> Transport:
        """A new transport; where both tiers are one file, always the same."""
        if device.type not in WITHOUT_STREAMS:
            return transport_for(device, tier, self.use)
        self._file = self._file or transport_for(device, tier, self.use)
        return self._file

    def __reduce__(self) -> tuple[type[OffloadTransports], tuple[int | None]]:
        return OffloadTransports, (self.use.limit,)


def host_bytes_of(copies: Iterable[Copy], device_kind: str, limit: int | None = None) -> int:
    """Host memory that offloading claims for a step with these copies, its pools' rounding included.

    What the real pools would do is done on paper, for a few steps. With a ``limit`` areas are made no larger than it
    allows; an answer above it means that the pools would refuse. Without streams the mapped file is what counts: its
    pages lie in host memory until the system writes them out.
    """
    use = HostUse(limit, on_paper=True)
    file = device_kind in WITHOUT_STREAMS
    copies = [copy for copy in copies if copy.direction == "out"]
    if not file and any(copy.tier == "disk" for copy in copies):
        use.claim(staging_bytes(limit))
    area: AreaBytes = file_area if file else pinned_area
    pool: Pool[range] = Pool(range, area, use)
    places: dict[int, Piece[range]] = {}
    mine = [(n, copy) for n, copy in enumerate(copies) if file or copy.tier == "cpu"]
    taken, given = 0, 1  # at one op in this order, which errs on the safe side
    events = sorted(
        [(copy.issued, taken, n) for n, copy in mine]
        + [(copy.released, given, n) for n, copy in mine if copy.released is not None]
    )
    sizes = {n: copy.bytes for n, copy in mine}
    for _ in range(_STEPS):
        for _, kind, n in events:
            if kind == taken:
                places[n] = pool.take(sizes[n])
            else:
                pool.give(places.pop(n))
        for piece in places.values():  # what lives on past the step goes with the next one's
            pool.give(piece)
        places.clear()
    return use.peak


def host_notes(environment: Environment, host_bytes: int, host_budget: int | None = None) -> tuple[str, ...]:
    """A note on the host memory that a plan's offloading takes, and on what there is; none where it takes none.

    ``environment`` is that of the plan: the machine here, or a described device, whose host is not described.
    """
    if not host_bytes:
        return ()
    pinned = environment.device.kind not in WITHOUT_STREAMS
    how = "pinned (page-locked) host memory" if pinned else "host memory, in a mapped file"
    if (device := environment.versions.get("simulated")) is not None:
        there = f"Host memory of the machine with the {device} is unknown: check that it has as much free."
    else:
        host = CpuDevice()
        there = f"This host has {format_binary(host.capacity())}, of which {format_binary(host.free())} are free now."
    bound = "--host-budget bounds it." if host_budget is None else f"--host-budget allows {format_binary(host_budget)}."
    return (f"Offloading takes {format_binary(host_bytes)} of {how} in each process. {there} {bound}",)
