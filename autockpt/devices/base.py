"""What devices answer, and how offload moves bytes off them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Peak:
    """Most bytes that the device's allocator held during one call, resident bytes included.

    ``peak_bytes`` is what counts against a budget (CUDA: reserved memory), ``allocated_bytes`` the peak of what tensors
    occupied where the device tells the two apart, else None.
    """

    peak_bytes: int
    allocated_bytes: int | None = None


class MemoryReading(NamedTuple):
    """Bytes that tensors hold (``allocated``) and the allocator does (``reserved``), and the most since the last reset.

    ``retries``: how often the allocator had to give its cache back to serve a request; ``free``: bytes that it may hold
    as far as others go.
    """

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    retries: int
    free: int


class OffloadHandle:
    """The bytes of one storage on their way off the device and back.

    Whoever holds the handle owns it: when the last reference goes, so do the bytes, wherever they are. What differs
    between transports is how the copy off the device is waited for, and how bytes come back.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._source: torch.Tensor | None = source
        self._back: torch.Tensor | None = None

    def settle(self) -> None:
        """From here on the source may be released: the compute queue waits for the copy off the device. Idempotent."""
        if self._source is not None:
            self._wait_until_left()
            self._source = None

    def fetch(self) -> None:
        """Start copying back; ``get`` then waits less. Idempotent, and nothing to do before ``settle``."""
        if self._source is None and self._back is None:
            self._back = self._bring_back()

    def get(self) -> torch.Tensor:
        """The bytes on the device, 1-D uint8, usable on the current compute stream; fetches where needed."""
        if self._source is not None:
            return self._source
        self.fetch()
        assert self._back is not None
        self._wait_until_back(self._back)
        return self._back

    def release(self) -> None:
        """Forget the device side; the bytes can be fetched again. Tensors that ``get`` returned stay valid."""
        self._back = None

    def _wait_until_left(self) -> None:
        """Have the source's memory wait for the copy off the device."""

    def _bring_back(self) -> torch.Tensor:
        """A device buffer that the bytes are copied to from now on."""
        raise NotImplementedError

    def _wait_until_back(self, back: torch.Tensor) -> None:
        """Have the current compute queue wait for the copy to ``back``. Called for every user."""


class Transport(Protocol):
    """How offload moves bytes off a device and back.

    ``copy_queues`` says whether copies run alongside compute. Where they do, a unit's copies get until the end of the
    next unit's forward to finish before they are settled, and the unit before is fetched ahead in backward. Where they
    do not, they are settled as soon as the unit's forward ends, and ``get`` does the copying. A transport that stands
    in for another must carry the other's value.
    """

    copy_queues: bool

    def send(self, source: torch.Tensor) -> OffloadHandle:
        """Start copying ``source``, 1-D uint8 over one whole device storage, off the device.

        The handle keeps the source alive until ``settle``. Raises MeasurementError where the other side is full.
        """
        ...
