"""What CUDA streams do needs a GPU; what happens where the host refuses memory does not."""

from __future__ import annotations

import contextlib

import pytest
import torch

from autockpt.devices import streams
from autockpt.errors import MeasurementError


class Refusing:
    """CUDA's runtime on a host that will not pin memory."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address and nbytes == 4096
        return 2

    def cudaHostUnregister(self, address: int) -> int:
        raise AssertionError("nothing was registered")


def test_a_refusal_to_pin_is_said_and_not_left_for_the_next_kernel(monkeypatch):
    forgotten: list[torch.device] = []
    monkeypatch.setattr(streams, "_cudart", Refusing)
    monkeypatch.setattr(streams, "_forget_error", forgotten.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    device = torch.device("cuda", 0)
    with pytest.raises(MeasurementError, match="would not pin"):
        streams._PinnedMemory(-1, 4096).pin(device)
    assert forgotten == [device]
