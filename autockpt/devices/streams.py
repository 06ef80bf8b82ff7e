"""Offload through copy queues that run alongside compute, into pinned host memory.

PyTorch's own pinned allocator rounds sizes up to powers of two, and keeps what is freed. Host memory is dear, so for
CUDA areas of exact sizes are mapped and registered here.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from autockpt.devices.base import OffloadHandle
from autockpt.devices.hostpool import HostUse, Pool, pinned_area, whole_pages
from autockpt.errors import MeasurementError

Direction = Literal["out", "in"]


class AcceleratorQueues:
    """The copy queues of a device, one per direction, alongside its compute queues: streams, by PyTorch's generic API.

    Events stand for moments: when the work queued so far has been done, or when a copy has ended. All but
    ``host_memory``, ``device_memory``, ``mark``, ``wait`` and ``use`` may be called from any thread; those mean the
    calling thread's current compute queue.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._streams = {"out": torch.Stream(self.device), "in": torch.Stream(self.device)}

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory, 1-D uint8, that the copy queues can reach.

        It is from the backend's own pinned allocator, which may round up what it takes.
        """
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise MeasurementError(
                f"the host would not pin {nbytes / 2**20:.0f} MiB for offloading: {str(error).splitlines()[0]}",
                remedy="Free host memory, raise the limit on locked memory (ulimit -l, or memory= in .wslconfig under "
                "WSL2), set --host-budget, or offload fewer units.",
            ) from None
        # Not every backend's allocator waits for the copies that are still on their way when memory is given back.
        end = weakref.finalize(memory.untyped_storage(), torch.accelerator.synchronize, self.device)
        end.atexit = False
        return memory

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """A device buffer, 1-D uint8, that belongs to the current compute queue: freed in that queue's order."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> Any:
        """An event after all that the current compute queue has been given so far."""
        stream = torch.accelerator.current_stream(self.device)
        return _Mark(stream.record_event(), stream)

    def copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Any:
        """Queue a copy for after the events ``after``; the event of its end. Nobody is made to wait for it yet.

        The device's side must stay alive until somebody has: see ``wait``, ``finish`` and ``record_stream``.
        """
        stream = self._streams[direction]
        for event in after:
            stream.wait_event(event.event if isinstance(event, _Mark) else event)
        # not `with stream`: it remembers in itself what to go back to, and two threads may come here at once
        device, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)
        return stream.record_event()

    def all_in(self) -> Any:
        """The event of the end of all copies in so far: those out write to the host in their order anyway."""
        return self._streams["in"].record_event()

    def wait(self, event: Any) -> None:
        """Make the current compute queue wait for the event."""
        torch.accelerator.current_stream(self.device).wait_event(event)

    def wait_on(self, mark: Any, event: Any) -> None:
        """Make the compute queue on which ``mark`` was made wait for the event, if it is another than the current."""
        if mark.stream != torch.accelerator.current_stream(self.device):
            mark.stream.wait_event(event)

    def finish(self, event: Any) -> None:
        """Return when the event has come."""
        event.synchronize()

    def record_stream(self, buffer: torch.Tensor, direction: Direction) -> None:
        """The device buffer of copies that no compute queue waited for is about to be freed."""
        buffer.record_stream(self._streams[direction])

    def use(self, buffer: torch.Tensor) -> None:
        """The current compute queue is about to read a buffer that perhaps belongs to another."""
        buffer.record_stream(torch.accelerator.current_stream(self.device))


class CudaQueues(AcceleratorQueues):
    """As for any accelerator, through memory of exact sizes; through PyTorch's own where that cannot be registered."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        size, spare = whole_pages(nbytes), _spare or []
        memory = next((memory for memory in spare if len(memory) == size), None)
        if memory is not None:
            spare.remove(memory)
        else:
            _unpin(spare)  # what does not fit is given back before more is taken
            try:
                memory = _pinned(size, self.device)
            except (OSError, MemoryError, RuntimeError):
                return super().host_memory(nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        # the storage's Python object lives as long as any tensor that looks into it
        end = weakref.finalize(tensor.untyped_storage(), _let_go, memory, self.device)
        end.atexit = False
        return tensor


_spare: list[mmap.mmap] | None = None
"""Pinned memory that nobody uses, for the next that needs as much; None: it is given back at once."""


@contextmanager
def pinned_memory_kept() -> Iterator[None]:
    """While the block runs, pinned memory that is no longer used stays pinned for the next that needs as much.

    For plans that take turns: pinning takes some tenths of a second per GiB. What does not fit the next plan is given
    back before it allocates, so no more is held than by the plan that needs the most.
    """
    global _spare
    _spare = []
    try:
        yield
    finally:
        spare, _spare = _spare, None
        _unpin(spare)


def _pinned(size: int, device: torch.device) -> mmap.mmap:
    """New memory, registered with CUDA. Raises OSError or MemoryError where there is none, RuntimeError if refused."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_DONTFORK"):  # workers that load data would keep it alive
        memory.madvise(mmap.MADV_DONTFORK)
    with torch.cuda.device(device):
        if code := int(_cudart().cudaHostRegister(_address(memory), size, 0)):
            _forget_error()
            raise RuntimeError(f"cudaHostRegister returned {code}")
    return memory


def _let_go(memory: mmap.mmap, device: torch.device) -> None:
    with contextlib.suppress(Exception):  # the device may be gone
        torch.cuda.synchronize(device)  # copies that are on their way
        if _spare is not None:
            _spare.append(memory)
        else:
            _unpin([memory])


def _unpin(memories: list[mmap.mmap]) -> None:
    while memories:
        if int(_cudart().cudaHostUnregister(_address(memories.pop()))):
            _forget_error()


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _forget_error() -> None:
    """CUDA remembers a call that failed, and the next kernel of anybody is told of it: let that be one of ours."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()


class _Mark(NamedTuple):
    """A moment on a compute stream."""

    event: Any
    stream: Any


class StreamTransport:
    """Copies alongside compute, through pinned host memory that is used again from step to step.

    A step's memory does not depend on how fast copies are: a source is freed in the order of its compute queue, which
    waits for the copy. Only buffers that no compute queue waited for (``unwaited``: the ends of their copies) come free
    when their copies end, so the next one to be sent waits for these: there are never more than one step's.
    """

    copy_queues = True

    def __init__(self, queues: AcceleratorQueues, use: HostUse | None = None) -> None:
        self.queues = queues
        self.pool = Pool(queues.host_memory, pinned_area, use, moment=queues.all_in)
        self.unwaited: list[Any] = []

    def send(self, source: torch.Tensor) -> StreamHandle:
        """Start copying ``source`` (1-D uint8) to the host. Raises MeasurementError where host memory is exhausted, or
        would be over its budget."""
        with contextlib.suppress(IndexError):  # until it is empty, whoever else empties it
            while True:
                self.queues.finish(self.unwaited.pop())
        return StreamHandle(self, source)


class StreamHandle(OffloadHandle):
    """Bytes on their way through a copy queue.

    ``_left`` and ``_arrived`` are the events of the two copies. A device buffer is only let go when the compute queue
    that it belongs to waited for the copy that touches it, or when the allocator was told about the copy.
    """

    _left: Any = None
    _arrived: Any = None
    _waited = False

    def __init__(self, transport: StreamTransport, source: torch.Tensor) -> None:
        self._pool, self._queues, self._unwaited = transport.pool, transport.queues, transport.unwaited
        self._piece = self._pool.take(source.numel())
        self._ready = self._queues.mark()
        super().__init__(source)
        earlier = [] if self._piece.ready is None else [self._piece.ready]
        self._left = self._queues.copy("out", self._piece.memory, source, [self._ready, *earlier])

    def _wait_until_left(self) -> None:
        self._queues.wait(self._left)
        # the source is freed in the order of the queue that it was sent from, whatever the current one is
        self._queues.wait_on(self._ready, self._left)
        self._ready = None

    def _bring_back(self) -> torch.Tensor:
        back, self._waited = self._queues.device_memory(self.nbytes), False
        self._arrived = self._queues.copy("in", back, self._piece.memory, [self._queues.mark(), self._left])
        return back

    def _wait_until_back(self, back: torch.Tensor) -> None:
        self._queues.wait(self._arrived)  # each time: it may be another compute queue that asks
        self._waited = True
        self._queues.use(back)

    def release(self) -> None:
        # where the queue that waited is not the one that the buffer belongs to, `use` has told the allocator
        if self._back is not None and not self._waited:
            self._queues.record_stream(self._back, "in")
            self._unwaited.append(self._arrived)
        super().release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the device may be gone already at interpreter exit
            if self._source is not None:
                self._queues.record_stream(self._source, "out")
                self._unwaited.append(self._left)
            self.release()
            self._piece.ready = self._left if self._arrived is None else self._arrived
            self._pool.give(self._piece)
