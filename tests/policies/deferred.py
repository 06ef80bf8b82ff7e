"""Copy queues on the CPU that do nothing until somebody waits for them: a missing wait shows as garbage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autockpt.devices.streams import StreamTransport


class Event:
    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy: Callable[[], None] | None = copy

    @property
    def done(self) -> bool:
        return self._copy is None

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class DeferredQueues:
    """Answers the protocol ``Queues``. A source that was let go before its copy was waited for reads as garbage."""

    def __init__(self) -> None:
        self.sent = self.fetched = self.abandoned = 0

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, ready: Event | None) -> Event:
        self.sent += source.numel()
        held = weakref.ref(source)

        def copy() -> None:
            if ready is not None:
                ready.wait()
            alive = held()
            target.fill_(0xEE) if alive is None else target.copy_(alive)

        return Event(copy)

    def copy_in(self, source: torch.Tensor, after: Event) -> tuple[torch.Tensor, Event]:
        self.fetched += source.numel()
        buffer = torch.full((source.numel(),), 0xCD, dtype=torch.uint8)

        target = weakref.ref(buffer)

        def copy() -> None:
            after.wait()
            if (alive := target()) is not None:
                alive.copy_(source)

        return buffer, Event(copy)

    def wait(self, event: Event) -> None:
        event.wait()

    def abandon(self, buffer: torch.Tensor, direction: str) -> None:
        self.abandoned += buffer.numel()

    def use(self, buffer: torch.Tensor) -> None:
        pass


class DeferredTransport(StreamTransport):
    """``pieces`` counts host memory that is still in use."""

    queues: DeferredQueues

    def __init__(self) -> None:
        super().__init__(DeferredQueues())

    def pieces_in_use(self) -> int:
        self.pool._sort_returned()
        return sum(area.pieces for area in self.pool._areas)


def buffers_of(transport: Any) -> int:
    """Bytes of host memory that a transport holds."""
    return transport.pool.held_bytes
