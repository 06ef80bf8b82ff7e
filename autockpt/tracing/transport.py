"""The transport of recorded steps: offload's copies are recorded with their place in the step, and move no bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autockpt.devices.base import OffloadHandle
from autockpt.schema.graph import Copy, Tier
from autockpt.tracing.recorder import Recorder

Keep = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Called with a storage that is offloaded; the result makes a new device buffer with the same bytes."""


class RecordingTransport:
    """A Transport that records every copy. ``copy_queues`` are those of the real or simulated device."""

    def __init__(self, keep: Keep, copy_queues: bool, recorder: Recorder, tier: Tier = "cpu") -> None:
        self.keep, self.copy_queues, self.recorder = keep, copy_queues, recorder
        self.tier: Tier = tier

    def send(self, source: torch.Tensor) -> RecordingHandle:
        return RecordingHandle(self, source)


class RecordingHandle(OffloadHandle):
    """A storage that counts as offloaded. The op that runs next waits for a copy; each copy back is recorded."""

    _in: Copy

    def __init__(self, transport: RecordingTransport, source: torch.Tensor) -> None:
        super().__init__(source)
        self._recorder = transport.recorder
        self._module = self._recorder.location.module  # what comes back belongs where it was
        self._out = self._recorder.copy_issued("out", self.nbytes, self._module, transport.tier)
        self._made_again = transport.keep(source)

    def _wait_until_left(self) -> None:
        self._out.awaited = self._recorder.log.clock

    def _bring_back(self) -> torch.Tensor:
        self._in = self._recorder.copy_issued("in", self.nbytes, self._module, self._out.tier)
        return self._made_again()

    def _wait_until_back(self, back: torch.Tensor) -> None:
        if self._in.awaited is None:
            self._in.awaited = self._recorder.log.clock
        self._recorder.place(back)

    def __del__(self) -> None:
        self._out.released = self._recorder.log.clock
