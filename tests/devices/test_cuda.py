"""GPUs, with numbers in the place of PyTorch's; ``tests.gpu`` asks a real one."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autockpt.devices.accelerator import AcceleratorDevice
from autockpt.devices.cuda import MOST_CONTEXT, CudaDevice
from autockpt.errors import DeviceOutOfMemory
from tests.errors import raises

GIB = 2**30


@dataclass
class Gpu:
    """What CUDA and the allocator would answer: 80 GiB, of which 4 are reserved and this process's context takes 1."""

    total: int = 80 * GIB
    others: int = 0
    context: int = GIB
    reserved: int = 4 * GIB
    initialised: bool = True
    fraction: float = 1.0
    fractions: list[float] = field(default_factory=list)

    def set_fraction(self, value: float, device: Any) -> None:
        assert 0 <= value <= 1
        self.fraction = value
        self.fractions.append(value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for name, answer in {
        "is_initialized": lambda: made.initialised,
        "mem_get_info": lambda device: (made.total - made.others - made.context - made.reserved, made.total),
        "get_per_process_memory_fraction": lambda device: made.fraction,
        "set_per_process_memory_fraction": made.set_fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for name, answer in {
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device: made.reserved,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_reserved": lambda device: made.reserved + GIB,
        "max_memory_allocated": lambda device: made.reserved - GIB,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    return made


def test_nothing_is_opened_before_it_is_needed():
    device = CudaDevice()
    device.release()
    with device.limit(None):
        pass
    assert not torch.cuda.is_initialized()


def test_context_is_what_lies_outside_of_the_allocator(gpu):
    device = CudaDevice()
    assert (device.context_bytes(), device.used_by_others()) == (GIB, 0)
    gpu.context += GIB // 2  # kernels were loaded
    assert device.context_bytes() == GIB * 3 // 2
    gpu.others = 20 * GIB  # no context is as large as that
    assert device.context_bytes() == MOST_CONTEXT
    assert device.used_by_others() + device.context_bytes() == gpu.others + gpu.context


def test_a_budget_limits_the_allocator_beside_the_context(gpu):
    device = CudaDevice()
    with device.limit(24 * GIB):
        assert gpu.fraction == pytest.approx(23 / 80)
    assert gpu.fraction == 1.0
    with device.limit(200 * GIB):
        assert gpu.fraction == 1.0
    gpu.fraction = 0.1  # the user's own limit is lower
    with pytest.raises(KeyError), device.limit(24 * GIB):
        assert gpu.fraction == 0.1
        raise KeyError
    assert gpu.fraction == 0.1
    gpu.fractions.clear()
    with raises(DeviceOutOfMemory), device.limit(GIB):  # the context alone takes as much
        pass
    assert gpu.fractions == []


def test_the_limit_follows_the_context_as_kernels_are_loaded(gpu, monkeypatch):
    """FlashAttention and cuDNN are loaded by the first step that needs them."""
    emptied: list[float] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(gpu.fraction))
    device = CudaDevice()
    with device.limit(6 * GIB):
        for grown, measured in ((GIB // 2, device.time), (GIB, lambda fn: device.measure_peak(fn, resident=0))):
            gpu.context = GIB + grown
            measured(lambda: None)
            assert gpu.fraction == pytest.approx((5 * GIB - grown) / (80 * GIB))
        assert not emptied
        gpu.reserved = 4 * GIB + 1  # more than is left by now
        device.time(lambda: None)
        assert emptied == [gpu.fraction]
    device.time(lambda: None)
    assert gpu.fraction == 1.0


def test_the_peak_is_reserved_and_context_beside_allocated(gpu):
    peak = CudaDevice().measure_peak(lambda: None, resident=123)
    assert (peak.peak_bytes, peak.allocated_bytes) == (6 * GIB, 3 * GIB)


def test_failed_convolutions_count_as_out_of_memory(gpu, monkeypatch):
    failed = {"num_ooms": 3}  # of former trials
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(failed))
    device, error = CudaDevice(), RuntimeError("GET was unable to find an engine to execute this computation")
    gpu.initialised = False
    assert not device.out_of_memory(error)  # nothing has run on the GPU
    gpu.initialised = True
    monkeypatch.setattr("autockpt.devices.accelerator.is_open", lambda kind: False)
    device.release()
    assert not device.out_of_memory(error)
    failed["num_ooms"] = 4
    assert device.out_of_memory(error)
    device.release()
    assert not device.out_of_memory(error) and not device.out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize(("capability", "wanted"), [((8, 9), None), ((9, 0), ":4096:8"), ((12, 0), ":4096:8")])
def test_strict_determinism_is_kept_where_it_is_free(monkeypatch, capability, wanted):
    seen = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    CudaDevice()._open()
    assert seen == [wanted]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own
    CudaDevice()._open()
    assert seen[1] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize("device", [CudaDevice(), AcceleratorDevice("xpu")], ids=lambda device: device.kind)
@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("NPU Out Of Memory"), "xpu"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cuda"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "cuda"),
        (MemoryError(), False),  # the host's
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, full, device):
    assert device.out_of_memory(error) is (full in (True, device.kind))
