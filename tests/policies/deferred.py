"""Copy queues on the CPU that do nothing until somebody waits for them: a missing wait shows as garbage."""

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autockpt.devices.disk import DiskTransport
from autockpt.devices.hostpool import HostUse
from autockpt.devices.streams import AcceleratorQueues, StreamTransport
from autockpt.devices.transport import Transports
from tests.device import DEVICE


def always(transport: Any) -> Transports:
    """One and the same transport for every device and tier."""
    return lambda device, tier: transport


class Event:
    def __init__(self, copy: Callable[[], None] | None = None) -> None:
        self._copy = copy
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._copy is None

    def wait(self) -> None:
        with self._lock:
            copy, self._copy = self._copy, None
            if copy is not None:
                copy()


class DeferredQueues(AcceleratorQueues):
    """In place of an accelerator's. A source that was let go before its copy was waited for reads as garbage.

    Copies in one direction end in their order, as on a stream.
    """

    def __init__(self) -> None:
        self._last: dict[str, Event] = {}
        self.sent = self.fetched = self.abandoned = 0
        self.held_up: list[Event] = []

    def host_memory(self, nbytes: int) -> torch.Tensor:
        # in whole pages, as what files are written from directly
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(0xAB)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xCD, dtype=torch.uint8, device=DEVICE)

    def mark(self) -> Event:
        return Event()

    def copy(self, direction: str, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Event:
        if direction == "out":
            self.sent += source.numel()
        else:
            self.fetched += target.numel()
        on_device, on_host = (source, target) if direction == "out" else (target, source)
        device = _storage(on_device)
        first, size = on_device.storage_offset(), on_device.numel()
        del target, source, on_device
        before = self._last.get(direction, Event())

        def copy() -> None:
            for event in (before, *after):
                event.wait()
            if (alive := device()) is None:
                if direction == "out":
                    on_host.fill_(0xEE)
                return
            there = torch.empty(0, dtype=torch.uint8, device=alive.device).set_(alive, first, (size,), (1,))
            (on_host if direction == "out" else there).copy_(there if direction == "out" else on_host)

        self._last[direction] = event = Event(copy)
        return event

    def all_in(self) -> Event:
        return self._last.get("in", Event())

    def wait(self, event: Event) -> None:
        event.wait()

    def wait_on(self, mark: Event, event: Event) -> None:
        self.held_up.append(event)

    def finish(self, event: Event) -> None:
        event.wait()

    def record_stream(self, buffer: torch.Tensor, direction: str) -> None:
        self.abandoned += buffer.numel()

    def use(self, buffer: torch.Tensor) -> None:
        pass


def _storage(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """A storage's Python object lives as long as the storage."""
    return weakref.ref(tensor.untyped_storage())


class DeferredTransport(StreamTransport):
    """``pieces`` counts host memory that is still in use."""

    queues: DeferredQueues

    def __init__(self, use: HostUse | None = None) -> None:
        super().__init__(DeferredQueues(), use)

    def pieces_in_use(self) -> int:
        self.pool._sort_returned()
        return sum(area.pieces for area in self.pool._areas)


class DeferredDisk(DiskTransport):
    """The disk tier of an accelerator whose copies are the ones above. The files and the thread are real."""

    def drain(self) -> None:
        """Return when all that was asked for so far has been written and read."""
        self.thread.submit(lambda: None).result()

    queues: DeferredQueues

    def __init__(self, folder: Any = None, use: HostUse | None = None) -> None:
        super().__init__(DeferredQueues(), folder, use)

    def pieces_in_use(self) -> int:
        self.space._sort_returned()
        return sum(area.pieces for area in self.space._areas)
