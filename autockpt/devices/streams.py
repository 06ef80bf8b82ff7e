"""Offload through copy queues that run beside compute, into pinned host memory."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch

from autockpt.devices.hostpool import HostUse, Pool, pinned_area, whole_pages
from autockpt.errors import MeasurementError

Direction = Literal["out", "in"]


class Queues(Protocol):
    """The copy queues of a device, one per direction, beside its compute queues.

    Events stand for moments: when the work queued so far has been done, or when a copy has ended. All but
    ``host_memory``, ``device_memory``, ``mark``, ``wait`` and ``use`` may be called from any thread; those mean the
    calling thread's current compute queue.
    """

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory, 1-D uint8, that the copy queues can reach."""
        ...

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """A device buffer, 1-D uint8, that belongs to the current compute queue: freed in that queue's order."""
        ...

    def mark(self) -> Any:
        """An event after all that the current compute queue has been given so far."""
        ...

    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Any:
        """Queue a copy for after the events ``after``; the event of its end. Nobody is made to wait for it yet.

        The device's side must stay alive until somebody has: see ``wait``, ``finish`` and ``abandon``.
        """
        ...

    def wait(self, event: Any) -> None:
        """Make the current compute queue wait for the event."""
        ...

    def hold_up(self, mark: Any, event: Any) -> None:
        """Make the compute queue on which ``mark`` was made wait for the event, if it is another than the current."""
        ...

    def finish(self, event: Any) -> None:
        """Return when the event has come."""
        ...

    def abandon(self, buffer: torch.Tensor, direction: Direction) -> None:
        """The device buffer of copies that no compute queue waited for is about to be freed."""
        ...

    def use(self, buffer: torch.Tensor) -> None:
        """The current compute queue is about to read a buffer that perhaps belongs to another."""
        ...


class StreamTransport:
    """Copies beside compute, through pinned host memory that is used again from step to step."""

    copy_queues = True

    def __init__(self, queues: Queues, use: HostUse | None = None) -> None:
        self.queues = queues
        self.pool = Pool(queues.host_memory, pinned_area, use)

    def send(self, source: torch.Tensor) -> StreamParcel:
        """Start copying ``source`` (1-D uint8) to the host. Raises MeasurementError where host memory is exhausted, or
        would be over its budget."""
        return StreamParcel(self, source)


class StreamParcel:
    """Bytes on their way through a copy queue.

    ``_left`` and ``_arrived`` are the events of the two copies. A device buffer is only let go when the compute queue
    that it belongs to waited for the copy that touches it, or when the allocator was told about the copy.
    """

    _left: Any = None
    _arrived: Any = None
    _back: torch.Tensor | None = None
    _waited = False

    def __init__(self, transport: StreamTransport, source: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._pool, self._queues = transport.pool, transport.queues
        self._source: torch.Tensor | None = None
        self._piece = self._pool.take(self.nbytes)
        self._ready = self._queues.mark()
        earlier = [] if self._piece.ready is None else [self._piece.ready]
        self._source = source
        self._left = self._queues.copy("out", self._piece.memory, source, [self._ready, *earlier])

    def settle(self) -> None:
        if self._source is not None:
            self._queues.wait(self._left)
            # the source is freed in the order of the queue that it was sent from, whatever the current one is
            self._queues.hold_up(self._ready, self._left)
            self._source = self._ready = None

    def fetch(self) -> None:
        if self._source is None and self._back is None:
            back = self._queues.device_memory(self.nbytes)
            self._arrived = self._queues.copy("in", back, self._piece.memory, [self._queues.mark(), self._left])
            self._back, self._waited = back, False

    def get(self) -> torch.Tensor:
        if self._source is not None:
            return self._source
        self.fetch()
        assert self._back is not None
        self._queues.wait(self._arrived)  # each time: it may be another compute queue that asks
        self._waited = True
        self._queues.use(self._back)
        return self._back

    def release(self) -> None:
        if self._back is not None:
            # where the queue that waited is not the one that the buffer belongs to, `use` has told the allocator
            if not self._waited:
                self._queues.abandon(self._back, "in")
            self._back = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the device may be gone already at interpreter exit
            if self._source is not None:
                self._queues.abandon(self._source, "out")
            self.release()
            self._piece.ready = self._left if self._arrived is None else self._arrived
            self._pool.give(self._piece)


class CudaQueues:
    """Two streams of one CUDA device, besides whatever stream computes at the moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._streams = {"out": torch.cuda.Stream(self.device), "in": torch.cuda.Stream(self.device)}

    def host_memory(self, nbytes: int) -> torch.Tensor:
        size = whole_pages(nbytes)
        if _kept is None:
            return _PinnedMemory(-1, size).pin(self.device)
        place = next((n for n, kept in enumerate(_kept) if kept.idle and len(kept.memory) == size), None)
        if place is None:
            _kept[:] = [kept for kept in _kept if not kept.idle]
            memory = _PinnedMemory(-1, size)
            tensor = memory.pin(self.device)
        else:
            torch.cuda.synchronize(self.device)  # copies of whoever had it before
            memory = _kept.pop(place).memory
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
        _kept.append(_Kept(memory, weakref.ref(tensor.untyped_storage())))
        return tensor

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> _Mark:
        stream = torch.cuda.current_stream(self.device)
        return _Mark(stream.record_event(), stream)

    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Any:
        stream = self._streams[direction]
        for event in after:
            stream.wait_event(event.event if isinstance(event, _Mark) else event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def hold_up(self, mark: Any, event: Any) -> None:
        if mark.stream != torch.cuda.current_stream(self.device):
            mark.stream.wait_event(event)

    def finish(self, event: Any) -> None:
        event.synchronize()

    def abandon(self, buffer: torch.Tensor, direction: Direction) -> None:
        buffer.record_stream(self._streams[direction])

    def use(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))


class _Mark:
    """A moment on a compute stream."""

    __slots__ = ("event", "stream")

    def __init__(self, event: Any, stream: Any) -> None:
        self.event, self.stream = event, stream


@contextmanager
def pinned_memory_kept() -> Iterator[None]:
    """While the block runs, pinned memory that is no longer used stays pinned for whoever needs as much next.

    For plans that take turns: pinning takes some tenths of a second per GiB. What does not fit the next plan is given
    back before it allocates, so no more is held than by the plan that needs the most.
    """
    global _kept
    before, _kept = _kept, []
    try:
        yield
    finally:
        _kept = before


class _Kept(NamedTuple):
    """Pinned memory, and the storage over it: its Python object lives as long as any tensor that looks into it."""

    memory: _PinnedMemory
    storage: weakref.ref[torch.UntypedStorage]

    @property
    def idle(self) -> bool:
        return self.storage() is None


_kept: list[_Kept] | None = None


class _PinnedMemory(mmap.mmap):
    """Anonymous memory registered with CUDA. torch's own pinned allocator rounds sizes up to powers of two."""

    _registered: tuple[int, torch.device] | None = None

    def pin(self, device: torch.device) -> torch.Tensor:
        """The memory as a pinned 1-D uint8 tensor. Raises MeasurementError where the host refuses."""
        tensor = torch.frombuffer(self, dtype=torch.uint8)
        with torch.cuda.device(device):
            code = int(_cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
        if code:
            _forget_error(device)
            raise MeasurementError(
                f"the host would not pin {tensor.numel() / 2**20:.0f} MiB for offloading (CUDA error {code})",
                remedy="Raise the limit on locked memory (ulimit -l), free host memory, set --host-budget, or offload "
                "fewer units.",
            )
        self._registered = tensor.data_ptr(), device
        return tensor

    def __del__(self) -> None:
        if self._registered is not None:
            address, device = self._registered
            with contextlib.suppress(Exception):
                torch.cuda.synchronize(device)
            with contextlib.suppress(Exception):
                _cudart().cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """CUDA remembers a call that failed, and the next kernel of anybody is told of it: let that be one of ours."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _cudart() -> Any:
    return torch.cuda.cudart()
