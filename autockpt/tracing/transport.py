"""Offload's copies in a recorded step: they take place, and are noted with their place in the step."""

from __future__ import annotations

from typing import Any

import torch

from autockpt.devices.base import Parcel, Transport
from autockpt.devices.ghost import CopyLog


class NotingTransport:
    """A Transport around a device's own that notes every copy."""

    def __init__(self, inner: Transport, log: CopyLog) -> None:
        self._inner = inner
        self._log = log
        self.copy_queues = inner.copy_queues

    def send(self, source: torch.Tensor) -> NotingParcel:
        copy = self._log.copy_issued("out", source.numel() * source.element_size())
        return NotingParcel(self._inner.send(source), self._log, copy, self.copy_queues)


class NotingParcel:
    """A Parcel around a device's own."""

    def __init__(self, inner: Parcel, log: CopyLog, out: Any, copy_queues: bool) -> None:
        self.nbytes = inner.nbytes
        self._inner = inner
        self._log = log
        self._out = out
        self._back: Any = None
        self._copy_queues = copy_queues
        self._settled = False

    def settle(self) -> None:
        if not self._settled:
            self._log.copy_awaited(self._out)
            self._settled = True
        self._inner.settle()

    def fetch(self) -> None:
        if self._copy_queues:
            self._note_back()
        self._inner.fetch()

    def get(self) -> torch.Tensor:
        self._note_back()
        if self._back is not None:
            self._log.copy_awaited(self._back)
        return self._inner.get()

    def release(self) -> None:
        self._back = None
        self._inner.release()

    def _note_back(self) -> None:
        if self._settled and self._back is None:
            self._back = self._log.copy_issued("in", self.nbytes, self._out)
