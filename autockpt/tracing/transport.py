"""Offload's copies in a recorded step: noted with their place in it. In a ghost run nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from autockpt.devices.base import OffloadHandle
from autockpt.schema.graph import Tier
from autockpt.tracing.recorder import CopyRecord, Recorder

Send = Callable[[torch.Tensor], OffloadHandle]
Aside = Callable[[], AbstractContextManager[object]]


class NotingTransport:
    """A Transport that notes every copy. ``send`` makes it; what that does is done inside of ``aside``."""

    def __init__(
        self, send: Send, copy_queues: bool, recorder: Recorder, tier: Tier = "cpu", aside: Aside = nullcontext
    ) -> None:
        self._send = send
        self._tier: Tier = tier
        self.copy_queues, self.recorder, self.aside = copy_queues, recorder, aside

    def send(self, source: torch.Tensor) -> RecordingHandle:
        copy = self.recorder.copy_issued("out", source.numel() * source.element_size(), tier=self._tier)
        with self.aside():
            handle = self._send(source)
        return RecordingHandle(self, handle, copy)


class RecordingHandle(OffloadHandle):
    """A handle around another's."""

    def __init__(self, transport: NotingTransport, inner: OffloadHandle, out: CopyRecord) -> None:
        self.nbytes = inner.nbytes
        self._inner, self._out = inner, out
        self._in: CopyRecord | None = None
        self._copy_queues, self._recorder, self._aside = transport.copy_queues, transport.recorder, transport.aside

    def settle(self) -> None:
        if self._out.awaited is None:  # the op which runs next waits
            self._out.awaited = self._recorder.log.clock
        with self._aside():
            self._inner.settle()

    def fetch(self) -> None:
        if self._copy_queues:
            with self._aside():
                self._inner.fetch()
            self._note_back()

    def get(self) -> torch.Tensor:
        with self._aside():
            buffer = self._inner.get()
        self._note_back()
        if self._in is not None:
            if self._in.awaited is None:
                self._in.awaited = self._recorder.log.clock
            self._recorder.place(buffer)
        return buffer

    def release(self) -> None:
        self._in = None
        with self._aside():
            self._inner.release()

    def _note_back(self) -> None:
        if self._out.awaited is not None and self._in is None:
            self._in = self._recorder.copy_issued("in", self.nbytes, self._out)

    def __del__(self) -> None:
        self._out.released = self._recorder.log.clock


class GhostHandle(OffloadHandle):
    """A storage that is away only on paper: ``settle`` lets go of the source, coming back takes a new device buffer,
    which ``allocate`` makes."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], source: torch.Tensor) -> None:
        super().__init__(source)
        self._allocate = allocate

    def _bring_back(self) -> torch.Tensor:
        return self._allocate(self.nbytes)
