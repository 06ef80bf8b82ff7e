"""What CUDA streams do needs a GPU; what happens where the host refuses memory does not."""

from __future__ import annotations

import contextlib
import errno
import gc
import platform
from types import SimpleNamespace

import pytest
import torch

from autockpt.devices import cuda_pinned
from autockpt.devices.cuda import CudaDevice
from autockpt.errors import MeasurementError
from tests.errors import raises


class Refusing:
    """CUDA's runtime on a host that will not pin memory."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address and nbytes == 4096
        return 2

    def cudaHostUnregister(self, address: int) -> int:
        raise AssertionError("nothing was registered")


def test_a_refusal_to_pin_is_said_at_once(monkeypatch):
    forgotten: list[torch.device] = []
    monkeypatch.setattr(cuda_pinned, "_cudart", Refusing)
    monkeypatch.setattr(cuda_pinned, "_forget_error", forgotten.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    device = torch.device("cuda", 0)
    with raises(MeasurementError):
        cuda_pinned._PinnedMemory(-1, 4096).pin(device)
    assert forgotten == [device]


def test_wsl_takes_pytorchs_own_pinned_memory(monkeypatch, runtime):
    device, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda address, nbytes, flags: 801)
    monkeypatch.setattr(cuda_pinned, "_forget_error", lambda device: None)
    empty = torch.empty

    def from_torch(size, *, dtype, device, pin_memory):
        asked.append(size)
        if size > 4096:
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", from_torch)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    with raises(MeasurementError):
        cuda_pinned.CudaQueues(device).host_memory(4096)
    assert not asked  # on Linux itself that is an error
    release = "6.6.87.2-microsoft-standard-WSL2"
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(release=release))
    with cuda_pinned.pinned_memory_kept():
        assert cuda_pinned.CudaQueues(device).host_memory(4096).numel() == 4096
    with raises(MeasurementError, "WSL2") as caught:
        cuda_pinned.CudaQueues(device).host_memory(8192)
    assert ".wslconfig" in (caught.value.remedy or "") and not CudaDevice().out_of_memory(caught.value)


def test_a_host_without_memory_is_not_a_full_device(monkeypatch, runtime):
    def full(number: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(cuda_pinned, "_PinnedMemory", full)
    with raises(MeasurementError) as caught:
        cuda_pinned.CudaQueues(torch.device("cuda", 0)).host_memory(4096)
    assert not CudaDevice().out_of_memory(caught.value)


def test_a_failure_to_unregister_is_not_left_for_the_next_kernel(monkeypatch, runtime):
    forgotten: list[torch.device] = []
    monkeypatch.setattr(cuda_pinned, "_forget_error", forgotten.append)
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda address: 713)
    memory = cuda_pinned.CudaQueues(torch.device("cuda", 0)).host_memory(4096)
    del memory
    gc.collect()
    assert forgotten == [torch.device("cuda", 0)]


class Pinning:
    """CUDA's runtime on a host that pins; notes what is pinned now."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.times = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        self.times += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch) -> Pinning:
    made = Pinning()
    monkeypatch.setattr(cuda_pinned, "_cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    return made


def test_pinned_memory_goes_with_its_last_tensor(runtime):
    queues = cuda_pinned.CudaQueues(torch.device("cuda", 0))
    part = queues.host_memory(8192)[100:200]
    gc.collect()
    assert list(runtime.pinned.values()) == [8192]
    part.fill_(1)
    del part
    gc.collect()
    assert not runtime.pinned


def test_plans_that_take_turns_use_pinned_memory_again(runtime):
    device = torch.device("cuda", 0)
    with cuda_pinned.pinned_memory_kept():
        for _ in range(3):  # each turn has queues of its own
            queues = cuda_pinned.CudaQueues(device)
            first, second = queues.host_memory(8192), queues.host_memory(8192)
            assert first.data_ptr() != second.data_ptr()
            part = first[10:20]
            del first, second
            assert part.numel() == 10
            del part
        assert runtime.times == 2
        held = cuda_pinned.CudaQueues(device).host_memory(4096)  # another plan, which needs less
        gc.collect()
        assert sorted(runtime.pinned.values()) == [4096]
        del held
    gc.collect()
    assert not runtime.pinned
