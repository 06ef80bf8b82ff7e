"""The generic API's streams, answered by notes: what they do for real needs an accelerator."""

from __future__ import annotations

import gc

import pytest
import torch

from autockpt.devices.streams import AcceleratorQueues, StreamTransport
from autockpt.devices.transport import transport_for
from autockpt.errors import MeasurementError
from tests.accelerator import KIND
from tests.errors import raises

DEVICE = torch.device(KIND, 1)


class Bytes:
    """A copy's target that notes on which stream it was written."""

    def __init__(self, streams: dict[int, object], error: Exception | None = None) -> None:
        self.streams, self.error, self.written_on = streams, error, None

    def copy_(self, source: object, non_blocking: bool) -> None:
        assert non_blocking
        self.written_on = self.streams[1]
        if self.error is not None:
            raise self.error


def test_copies_use_their_own_streams_and_spare_current_ones(accelerator):
    queues = AcceleratorQueues(DEVICE)
    out, back = accelerator.made
    compute, accelerator.current_index = accelerator.streams[1], 0
    mark = queues.mark()
    target = Bytes(accelerator.streams)
    event = queues.copy("out", target, None, [mark])
    assert target.written_on is out and event.stream is out and out.waited == [mark.event]
    assert accelerator.streams[1] is compute and accelerator.current_index == 0
    failing = Bytes(accelerator.streams, KeyError())
    with pytest.raises(KeyError):
        queues.copy("in", failing, None, [])
    assert failing.written_on is back
    assert accelerator.streams[1] is compute and accelerator.current_index == 0


def test_waits_are_those_of_the_stream_that_is_current_then(accelerator):
    queues = AcceleratorQueues(torch.device(KIND))
    first = accelerator.streams[0]
    mark, event = queues.mark(), accelerator.made[0].record_event()
    queues.wait(event)
    queues.wait_on(mark, event)  # the same stream: it has waited
    assert first.waited == [event]
    accelerator.streams[0] = second = type(first)("side")
    queues.wait(event)
    queues.wait_on(mark, event)
    assert second.waited == [event] and first.waited == [event, event]


def test_pinned_memory_goes_back_when_no_copy_reads_it(accelerator):
    memory = AcceleratorQueues(DEVICE).host_memory(4096)
    part = memory[:10]
    del memory
    gc.collect()
    assert accelerator.calls == []
    del part
    gc.collect()
    assert accelerator.calls == ["wait"]


def test_transports_of_other_kinds(accelerator, monkeypatch):
    assert isinstance(transport_for(torch.device(KIND, 0)), StreamTransport)
    assert not transport_for("mps").copy_queues

    def none(device: torch.device) -> None:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", none)
    with raises(MeasurementError):
        transport_for(torch.device(KIND, 0), "disk")
    with raises(MeasurementError, "mtia"):
        transport_for("mtia")
