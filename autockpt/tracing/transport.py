"""Offload's copies in a recorded step: they take place, and are noted with their place in the step."""

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
