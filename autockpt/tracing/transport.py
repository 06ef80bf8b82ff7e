"""Offload's copies in a recorded step: noted with their place in it. In a ghost run nothing moves."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.devices.base import Parcel, Transport
from autockpt.schema.graph import Tier
from autockpt.tracing.recorder import CopyRecord, Recorder


class NotingTransport:
    """A Transport around a device's own that notes every copy; what it runs to make one is not recorded as ops."""

    def __init__(self, inner: Transport, recorder: Recorder, tier: Tier = "cpu") -> None:
        self._inner = inner
        self._recorder = recorder
        self._tier: Tier = tier
        self.copy_queues = inner.copy_queues

    def send(self, source: torch.Tensor) -> NotingParcel:
        copy = self._recorder.copy_issued("out", source.numel() * source.element_size(), tier=self._tier)
        with _disable_current_modes():
            parcel = self._inner.send(source)
        return NotingParcel(parcel, self._recorder, copy, self.copy_queues)


class NotingParcel:
    """A Parcel around a device's own."""

    def __init__(self, inner: Parcel, recorder: Recorder, out: CopyRecord, copy_queues: bool) -> None:
        self.nbytes = inner.nbytes
        self._inner = inner
        self._recorder = recorder
        self._out = out
        self._back: CopyRecord | None = None
        self._copy_queues = copy_queues
        self._settled = False

    def settle(self) -> None:
        if not self._settled:
            self._recorder.copy_awaited(self._out)
            self._settled = True
        with _disable_current_modes():
            self._inner.settle()

    def fetch(self) -> None:
        if self._copy_queues:
            self._note_back()
        with _disable_current_modes():
            self._inner.fetch()

    def get(self) -> torch.Tensor:
        self._note_back()
        with _disable_current_modes():
            buffer = self._inner.get()
        if self._back is not None:
            self._recorder.copy_awaited(self._back)
            self._recorder.place(buffer)
        return buffer

    def release(self) -> None:
        self._back = None
        with _disable_current_modes():
            self._inner.release()

    def _note_back(self) -> None:
        if self._settled and self._back is None:
            self._back = self._recorder.copy_issued("in", self.nbytes, self._out, self._out.tier)

    def __del__(self) -> None:
        self._recorder.copy_released(self._out)


class GhostTransport:
    """A Transport for ghost runs: copies take no time and move no bytes, but are noted with their place in the step.

    ``copy_queues`` is that of the transport it stands in for.
    """

    def __init__(self, recorder: Recorder, *, copy_queues: bool = False, tier: Tier = "cpu") -> None:
        self._recorder = recorder
        self.copy_queues = copy_queues
        self._tier: Tier = tier

    def send(self, source: torch.Tensor) -> GhostParcel:
        """Note a copy of ``source`` (1-D uint8 over one whole storage) off the device."""
        return GhostParcel(self._recorder, source, self.copy_queues, self._tier)


class GhostParcel:
    """A storage that is away only on paper: ``settle`` lets go of the source, coming back takes a new device buffer."""

    def __init__(self, recorder: Recorder, source: torch.Tensor, copy_queues: bool = False, tier: Tier = "cpu") -> None:
        self.nbytes = source.numel() * source.element_size()
        self._recorder = recorder
        self._copy_queues = copy_queues
        self._source: torch.Tensor | None = source
        self._buffer: torch.Tensor | None = None
        self._tier: Tier = tier
        self._out = recorder.copy_issued("out", self.nbytes, tier=tier)
        self._back: CopyRecord | None = None

    def settle(self) -> None:
        """The source may be released from here on. Idempotent."""
        if self._source is not None:
            self._recorder.copy_awaited(self._out)
            self._source = None

    def fetch(self) -> None:
        """Start the copy back, where copies have queues. Idempotent, and nothing to do before ``settle``."""
        if self._copy_queues:
            self._copy_back()

    def get(self) -> torch.Tensor:
        """The bytes' place on the device, 1-D uint8: the source itself while it has not been settled."""
        if self._source is not None:
            return self._source
        self._copy_back()
        assert self._buffer is not None and self._back is not None
        self._recorder.copy_awaited(self._back)
        return self._buffer

    def release(self) -> None:
        """Forget the device side; the bytes can be fetched again."""
        self._buffer = self._back = None

    def _copy_back(self) -> None:
        if self._source is None and self._buffer is None:
            self._buffer = self._recorder.allocate(self.nbytes)
            self._back = self._recorder.copy_issued("in", self.nbytes, self._out, self._tier)

    def __del__(self) -> None:
        self._recorder.copy_released(self._out)
