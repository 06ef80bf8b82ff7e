"""The generic API's streams and CUDA's pinned memory, answered by notes: what they do for real needs a device."""

import contextlib
import gc

import pytest
import torch

from autockpt.devices import streams
from autockpt.devices.cuda import CudaDevice
from autockpt.devices.streams import AcceleratorQueues, CudaQueues, StreamTransport, pinned_memory_kept
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


CUDA = torch.device("cuda", 0)


class Runtime:
    """CUDA's runtime: what is pinned now, or ``refuses``. ``forgotten`` counts errors that nobody else will see."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.times = self.forgotten = self.refuses = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.pinned[address] = nbytes
            self.times += 1
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return self.refuses

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(streams, "_cudart", lambda: made)
    monkeypatch.setattr(streams, "_forget_error", made.forget)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    return made


def test_pinned_memory_goes_with_its_last_tensor(runtime):
    part = CudaQueues(CUDA).host_memory(8191)[100:200]
    gc.collect()
    assert list(runtime.pinned.values()) == [8192] and not runtime.forgotten
    part.fill_(1)
    runtime.refuses = 713
    del part
    gc.collect()
    assert not runtime.pinned and runtime.forgotten == 1


def test_plans_that_take_turns_use_pinned_memory_again(runtime):
    with pinned_memory_kept():
        for _ in range(3):  # each turn has queues of its own
            queues = CudaQueues(CUDA)
            first, second = queues.host_memory(8192), queues.host_memory(8192)
            assert first.data_ptr() != second.data_ptr()
            part = first[10:20]
            del first, second
            assert part.numel() == 10
            del part
        assert runtime.times == 2
        held = CudaQueues(CUDA).host_memory(4096)  # another plan, which needs less
        gc.collect()
        assert sorted(runtime.pinned.values()) == [4096]
        del held
    gc.collect()
    assert not runtime.pinned


def test_pytorchs_own_pinned_memory_where_none_can_be_registered(monkeypatch, runtime):
    """As under WSL2. A host that has no more is not a full device."""
    runtime.refuses = 801
    empty = torch.empty

    def from_torch(size, *, dtype, device, pin_memory):
        if size > 4096:
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", from_torch)
    assert CudaQueues(CUDA).host_memory(4096).numel() == 4096
    with raises(MeasurementError) as caught:
        CudaQueues(CUDA).host_memory(8192)
    assert ".wslconfig" in (caught.value.remedy or "") and not CudaDevice().out_of_memory(caught.value)
    assert runtime.forgotten == 2
