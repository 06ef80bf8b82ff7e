"""Offload's copies in a recorded step: noted with their place in it. In a ghost run nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from autockpt.devices.base import OffloadHandle, Transport
from autockpt.schema.graph import Tier
from autockpt.tracing.recorder import CopyRecord, Recorder

Aside = Callable[[], AbstractContextManager[object]]


class NotingTransport:
    """A Transport around another that notes every copy. What the other does for it is done inside of ``aside``."""

    def __init__(self, inner: Transport, recorder: Recorder, tier: Tier = "cpu", aside: Aside = nullcontext) -> None:
        self._inner = inner
        self._recorder = recorder
        self._tier: Tier = tier
        self._aside = aside
        self.copy_queues = inner.copy_queues

    def send(self, source: torch.Tensor) -> RecordingHandle:
        copy = self._recorder.copy_issued("out", source.numel() * source.element_size(), tier=self._tier)
        with self._aside():
            handle = self._inner.send(source)
        return RecordingHandle(handle.nbytes, handle, self._recorder, copy, self.copy_queues, self._aside)


@dataclass(eq=False)
class RecordingHandle(OffloadHandle):
    """A handle around another's."""

    nbytes: int
    _inner: OffloadHandle
    _recorder: Recorder
    _out: CopyRecord
    _copy_queues: bool
    _aside: Aside
    _in: CopyRecord | None = None

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


@dataclass
class GhostTransport:
    """A Transport for ghost runs, in which nothing moves: to be wrapped by one that notes the copies.

    ``allocate`` makes a ghost buffer; ``copy_queues`` is that of the transport it stands in for.
    """

    allocate: Callable[[int], torch.Tensor]
    copy_queues: bool

    def send(self, source: torch.Tensor) -> GhostHandle:
        return GhostHandle(self.allocate, source)


class GhostHandle(OffloadHandle):
    """A storage that is away only on paper: ``settle`` lets go of the source, coming back takes a new device buffer."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], source: torch.Tensor) -> None:
        super().__init__(source)
        self._allocate = allocate

    def _bring_back(self) -> torch.Tensor:
        return self._allocate(self.nbytes)
