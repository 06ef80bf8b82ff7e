"""Offload through copy queues that run beside compute, into pinned host memory."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, Protocol

import torch

from autockpt.devices.hostpool import AREA_BYTES, Pool
from autockpt.errors import MeasurementError

DEDICATED_BYTES = 8 << 20  # pieces from this size on get an area of their own, so that little is left over


class Queues(Protocol):
    """The copy queues of a device, one per direction. ``Event`` stands for the moment at which a copy has ended."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory, 1-D uint8, that the copy queues can reach."""
        ...

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, ready: Any) -> Any:
        """Queue device ``source`` -> host ``target``, after the compute queued so far and the event ``ready``."""
        ...

    def copy_in(self, source: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Queue host ``source`` -> a new device buffer, after the compute queued so far and the event ``after``."""
        ...

    def wait(self, event: Any) -> None:
        """Make the current compute queue wait for the event."""
        ...

    def abandon(self, buffer: torch.Tensor, direction: str) -> None:
        """The device buffer of a copy (``out`` or ``in``) that nobody waited for is about to be freed."""
        ...

    def use(self, buffer: torch.Tensor) -> None:
        """The current compute queue is about to read a buffer that ``copy_in`` made, perhaps on another queue."""
        ...


class StreamTransport:
    """Copies beside compute, through pinned host memory that is used again from step to step."""

    copy_queues = True

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.pool = Pool(queues.host_memory, lambda nbytes, _: nbytes if nbytes >= DEDICATED_BYTES else AREA_BYTES)

    def send(self, source: torch.Tensor) -> StreamParcel:
        """Start copying ``source`` (1-D uint8) to the host. Raises MeasurementError where host memory is exhausted."""
        return StreamParcel(self, source)


class StreamParcel:
    """Bytes on their way through a copy queue.

    ``_left`` and ``_arrived`` are the events of the two copies. A device buffer is only let go when the compute queue
    waited for the copy that touches it, or when the allocator was told about the copy.
    """

    def __init__(self, transport: StreamTransport, source: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._pool, self._queues = transport.pool, transport.queues
        self._piece = self._pool.take(self.nbytes)
        self._source: torch.Tensor | None = source
        self._back: torch.Tensor | None = None
        self._left = self._queues.copy_out(self._piece.memory, source, self._piece.ready)
        self._arrived: Any = None
        self._waited = False

    def settle(self) -> None:
        if self._source is not None:
            self._queues.wait(self._left)
            self._source = None

    def fetch(self) -> None:
        if self._source is None and self._back is None:
            self._back, self._arrived = self._queues.copy_in(self._piece.memory, self._left)
            self._waited = False

    def get(self) -> torch.Tensor:
        if self._source is not None:
            return self._source
        self.fetch()
        assert self._back is not None
        if not self._waited:
            self._queues.wait(self._arrived)
            self._waited = True
        self._queues.use(self._back)
        return self._back

    def release(self) -> None:
        if self._back is not None and not self._waited:
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
        self._out, self._in = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        memory = _PinnedMemory(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return memory.pin(self.device)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, ready: Any) -> Any:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        if ready is not None:
            self._out.wait_event(ready)
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
        return self._out.record_event()

    def copy_in(self, source: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        # allocated on the compute stream, so that the allocator frees it in that stream's order
        buffer = torch.empty(source.numel(), dtype=torch.uint8, device=self.device)
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            buffer.copy_(source, non_blocking=True)
        return buffer, self._in.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def abandon(self, buffer: torch.Tensor, direction: str) -> None:
        buffer.record_stream(self._out if direction == "out" else self._in)

    def use(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))


class _PinnedMemory(mmap.mmap):
    """Anonymous memory registered with CUDA. torch's own pinned allocator rounds sizes up to powers of two."""

    _registered: tuple[int, torch.device] | None = None

    def pin(self, device: torch.device) -> torch.Tensor:
        """The memory as a pinned 1-D uint8 tensor. Raises MeasurementError where the host refuses."""
        tensor = torch.frombuffer(self, dtype=torch.uint8)
        with torch.cuda.device(device):
            code = int(_cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
        if code:
            raise MeasurementError(
                f"the host would not pin {tensor.numel() / 2**20:.0f} MiB for offloading (CUDA error {code})",
                remedy="Raise the limit on locked memory (ulimit -l), free host memory, or offload fewer units.",
            )
        self._registered = tensor.data_ptr(), device
        return tensor

    def __del__(self) -> None:
        if self._registered is not None:
            with contextlib.suppress(Exception):
                address, device = self._registered
                torch.cuda.synchronize(device)
                _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
