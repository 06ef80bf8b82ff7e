"""The ghost device's side of offload: nothing moves, every copy is noted."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from autockpt.schema.graph import Tier


class CopyLog(Protocol):
    """Who notes copies and hands out device buffers: the recorder of a ghost run."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 device buffer."""
        ...

    def copy_issued(self, direction: str, nbytes: int, back_from: Any = None, tier: Tier = "cpu") -> Any:
        """A copy "out" of or "in"to the device starts now, to or from ``tier``; the answer identifies it.

        ``back_from`` is the answer for the copy out whose bytes come back.
        """
        ...

    def copy_awaited(self, copy: Any) -> None:
        """The compute queue waits for the end of a copy; only the first time counts."""
        ...

    def copy_released(self, copy: Any) -> None:
        """What a copy took out of the device is no longer needed. Called by finalisers."""
        ...


class GhostTransport:
    """A Transport for ghost runs: copies take no time and move no bytes, but are noted with their place in the step.

    ``copy_queues`` is that of the transport it stands in for.
    """

    def __init__(self, recorder: CopyLog, *, copy_queues: bool = False, tier: Tier = "cpu") -> None:
        self._recorder = recorder
        self.copy_queues = copy_queues
        self._tier: Tier = tier

    def send(self, source: torch.Tensor) -> GhostParcel:
        """Note a copy of ``source`` (1-D uint8 over one whole storage) off the device."""
        return GhostParcel(self._recorder, source, self.copy_queues, self._tier)


class GhostParcel:
    """A storage that is away only on paper: ``settle`` lets go of the source, coming back takes a new device buffer."""

    def __init__(self, recorder: CopyLog, source: torch.Tensor, copy_queues: bool = False, tier: Tier = "cpu") -> None:
        self.nbytes = source.numel() * source.element_size()
        self._recorder = recorder
        self._copy_queues = copy_queues
        self._source: torch.Tensor | None = source
        self._buffer: torch.Tensor | None = None
        self._tier: Tier = tier
        self._out = recorder.copy_issued("out", self.nbytes, tier=tier)
        self._back: Any = None

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
        self._recorder.copy_awaited(self._back)
        assert self._buffer is not None
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
