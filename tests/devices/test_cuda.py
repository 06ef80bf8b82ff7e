"""GPUs. Arithmetic is tested everywhere, with numbers in the place of driver and PyTorch; the rest needs a GPU."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autockpt.devices import nvml
from autockpt.devices.cuda import CudaDevice
from autockpt.errors import DeviceOutOfMemory
from tests.errors import raises

GIB = 2**30
needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no NVIDIA GPU that PyTorch can use"),
]


@dataclass
class Gpu:
    """What the driver and the allocator would answer. 80 GiB, of which others hold 10 and this process's context 1."""

    total: int = 80 * GIB
    others: int = 10 * GIB
    context: int = GIB
    reserved: int = 4 * GIB
    initialised: bool = False
    fraction: float = 1.0
    fractions: list[float] = field(default_factory=list)

    @property
    def used(self) -> int:
        return self.others + (self.context + self.reserved if self.initialised else 0)

    def init(self) -> None:
        self.initialised = True

    def set_fraction(self, value: float, device: Any) -> None:
        assert 0 <= value <= 1
        self.fraction = value
        self.fractions.append(value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for name, answer in {
        "is_initialized": lambda: made.initialised,
        "init": made.init,
        "mem_get_info": lambda device: (made.total - made.used, made.total),
        "memory_reserved": lambda device: made.reserved,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for name, answer in {
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_reserved": lambda device: made.reserved + GIB,
        "max_memory_allocated": lambda device: made.reserved - GIB,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: made.fraction)
    monkeypatch.setattr(torch.cuda.memory, "set_per_process_memory_fraction", made.set_fraction)
    monkeypatch.setattr(CudaDevice, "_load_libraries", lambda self: None)
    monkeypatch.setattr(nvml, "total_bytes", lambda index: made.total)
    monkeypatch.setattr(nvml, "used_bytes", lambda index: made.used)
    monkeypatch.setattr(nvml, "processes", lambda index: None)
    return made


def test_a_parent_process_asks_the_driver_and_opens_nothing(gpu):
    device = CudaDevice()
    assert device.capacity() == 80 * GIB
    assert device.used_by_others() == 10 * GIB
    device.release()
    with device.limit(None):
        pass
    assert not gpu.initialised


def test_context_is_what_this_process_holds_beside_the_allocator(gpu):
    device = CudaDevice()
    assert device.context_bytes() == GIB
    assert gpu.initialised
    assert device.used_by_others() == 10 * GIB
    gpu.context += GIB // 2  # kernels were loaded
    assert device.context_bytes() == GIB * 3 // 2


def test_context_as_the_driver_tells_it_per_process(gpu, monkeypatch):
    monkeypatch.setattr(nvml, "processes", lambda index: {7: GIB, os.getpid(): 6 * GIB})
    gpu.initialised = True  # by the user's own code
    assert CudaDevice().context_bytes() == 2 * GIB


def test_in_a_container_the_process_is_known_by_its_context(gpu, monkeypatch):
    monkeypatch.setattr(nvml, "processes", lambda index: {7: GIB} | ({4711: 6 * GIB} if gpu.initialised else {}))
    assert CudaDevice().context_bytes() == 2 * GIB


def test_what_other_processes_take_later_is_not_this_ones(gpu):
    device = CudaDevice()
    assert device.context_bytes() == GIB
    gpu.others += 20 * GIB
    assert device.context_bytes() == 2 * GIB  # no more than libraries can have taken
    assert device.used_by_others() == 29 * GIB
    gpu.others -= 30 * GIB
    assert device.context_bytes() == GIB


def test_what_cannot_be_told_apart_counts_as_context(gpu, monkeypatch):
    monkeypatch.setattr(nvml, "used_bytes", lambda index: None)
    gpu.initialised = True  # by the user's own code, before we could ask
    assert CudaDevice().context_bytes() == 11 * GIB


def test_a_budget_limits_the_allocator_beside_the_context(gpu):
    device = CudaDevice()
    with device.limit(24 * GIB):
        assert gpu.fraction == pytest.approx(23 / 80)
    assert gpu.fraction == 1.0
    gpu.fraction = 0.1  # the user's own limit is lower
    with pytest.raises(KeyError), device.limit(24 * GIB):
        assert gpu.fraction == 0.1
        raise KeyError
    assert gpu.fraction == 0.1


def test_the_limit_follows_the_context_once_a_plan_has_warmed_up(gpu, monkeypatch):
    """FlashAttention and cuDNN are loaded by the first step that needs them."""
    emptied: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(gpu.fraction))
    device = CudaDevice()
    with device.limit(6 * GIB):
        for grown in (GIB // 2, GIB):
            device.release()
            gpu.context = GIB + grown  # its first cycle
            before = len(gpu.fractions)
            device.time(lambda: None)
            assert gpu.fraction == pytest.approx((5 * GIB - grown) / (80 * GIB))
            device.measure_peak(lambda: None, resident=0)
            assert len(gpu.fractions) == before + 1
        assert not emptied
        gpu.reserved = 4 * GIB + 1  # more than is left by now
        device.release()
        device.measure_peak(lambda: None, resident=0)
        assert emptied[-1] == gpu.fraction
    assert gpu.fraction == 1.0
    device.release()
    device.time(lambda: None)
    assert gpu.fraction == 1.0


def test_a_budget_above_all_memory_is_all_memory(gpu):
    with CudaDevice().limit(200 * GIB):
        assert gpu.fraction == 1.0


def test_a_budget_below_the_context_cannot_be_met(gpu):
    with raises(DeviceOutOfMemory), CudaDevice().limit(GIB):
        pass
    assert gpu.fractions == []


def test_failed_convolutions_count_as_out_of_memory(gpu, monkeypatch):
    failed = {"num_ooms": 3}  # of former trials
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(failed))
    device, error = CudaDevice(), RuntimeError("GET was unable to find an engine to execute this computation")
    assert not device.out_of_memory(error)  # nothing has run on the GPU
    gpu.initialised = True
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
    CudaDevice()._load_libraries()
    assert seen == [wanted]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own
    CudaDevice()._load_libraries()
    assert seen[1] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_the_peak_is_reserved_and_context_beside_allocated(gpu):
    calls: list[int] = []
    peak = CudaDevice().measure_peak(lambda: calls.append(1), resident=123)
    assert calls == [1]
    assert (peak.peak_bytes, peak.allocated_bytes) == (6 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), False),  # the host's
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, full):
    assert CudaDevice().out_of_memory(error) is full


class Library:
    """In the place of the driver's management library, whose numbers follow the bus: GPU 3 has two processes on it.

    ``cards``: name, bytes and capability by number; CUDA counts the fastest first.
    """

    def __init__(self, *, pids: dict[int, int] | None = None, divided: bool = False) -> None:
        self.pids = pids or {}
        self.divided = divided
        self.cards = [(b"H100", 800, (9, 0))] * 4

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = 1000 + index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid != b"GPU-3":
            return 6
        handle._obj.value = 1003
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, name: Any, length: ctypes.c_uint) -> int:
        name.value = self._card(handle)[0]
        return 0

    def nvmlDeviceGetMigMode(self, handle: ctypes.c_void_p, now: Any, pending: Any) -> int:
        now._obj.value = self.divided
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        total = self._card(handle)[1]
        memory._obj.total, memory._obj.free, memory._obj.used = total, total - 500, 500
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: ctypes.c_void_p, count: Any, found: Any) -> int:
        assert count._obj.value >= len(self.pids) and handle.value == 1003
        count._obj.value = len(self.pids)
        for entry, (pid, used) in zip(found, self.pids.items(), strict=False):
            entry.pid, entry.used = pid, used
        return 0

    def _card(self, handle: ctypes.c_void_p) -> tuple[bytes, int, tuple[int, int]]:
        return self.cards[(handle.value or 0) - 1000]


class NewerLibrary(Library):
    """One that tells the driver's own 60 bytes apart, and the compute capability."""

    def nvmlDeviceGetMemoryInfo_v2(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert memory._obj.version == 40 | 2 << 24
        total = self._card(handle)[1]
        memory._obj.total, memory._obj.reserved, memory._obj.free, memory._obj.used = total, 60, 300, 440
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._card(handle)[2]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> NewerLibrary:
    """CUDA has not started; its GPU 1 is the library's GPU 3."""
    made = NewerLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda index: index + 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return made


def known(index: int) -> tuple[Any, ...]:
    return nvml.total_bytes(index), nvml.used_bytes(index), nvml.processes(index), nvml.capability(index)


def test_the_drivers_library_is_read_by_its_own_numbering(library, monkeypatch):
    older = Library(pids={1: 70, 5: 90})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: older)
    assert known(1) == (800, 500, {1: 70, 5: 90}, None)  # capabilities are told by newer ones
    older.pids[5] = (1 << 64) - 1
    assert nvml.processes(1) == {1: 70}


def test_what_the_driver_keeps_for_itself_is_nobodys_memory(library):
    assert known(1) == (740, 440, {}, (9, 0))


def test_mixed_cards_are_not_trusted_before_cuda_starts(library, monkeypatch):
    """CUDA's first GPU is the fastest; the library's is that of the first slot, a T4 here."""
    library.cards = [(b"T4", 160, (7, 5)), *library.cards[1:]]
    library.pids = {5: 90}
    assert known(1) == (None,) * 4
    for name, value in (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-3")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert known(1) == (740, 440, {5: 90}, (9, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")  # numbers in CUDA's own order
    assert known(1) == (None,) * 4
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{index + 2}"))
    assert known(1) == (740, 440, {5: 90}, (9, 0))
    assert known(0) == (None,) * 4  # the library knows no such GPU


def test_the_memory_of_a_divided_gpu_is_not_this_processs(library):
    library.divided = True
    assert known(1) == (None, None, None, (9, 0))


def test_context_is_told_by_one_source_from_beginning_to_end(gpu, monkeypatch):
    """CUDA does not count what the driver keeps for itself; its library may."""
    drivers_own = GIB // 2
    monkeypatch.setattr(nvml, "used_bytes", lambda index: gpu.used + drivers_own)
    assert CudaDevice().context_bytes() == GIB


def test_a_library_that_cannot_make_its_handle_is_out_of_memory():
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert CudaDevice().out_of_memory(error)


def test_without_the_drivers_library_nothing_is_known(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert (nvml.total_bytes(0), nvml.used_bytes(0), nvml.processes(0), nvml.capability(0)) == (None,) * 4


@pytest.fixture
def device():
    made = CudaDevice()
    made.release()
    yield made
    made.release()


class TestOnGpu:
    pytestmark = needs_gpu

    def test_description(self, device):
        info = device.describe()
        assert info.name == torch.cuda.get_device_name(0)
        assert 0 < info.overhead_bytes < info.capacity_bytes == device.capacity()

    def test_peak_reserved_and_allocated(self, device):
        held = torch.cuda.memory_allocated()

        def fn() -> None:
            a = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
            b = torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda")
            del a, b
            torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")

        peak = device.measure_peak(fn, resident=0)
        assert peak.allocated_bytes == held + 96 * 2**20
        assert peak.peak_bytes >= peak.allocated_bytes + device.context_bytes() // 2

    def test_a_budget_is_a_real_limit_and_memory_comes_back(self, device):
        budget = device.context_bytes() + torch.cuda.memory_reserved() + 256 * 2**20
        before = torch.cuda.memory.get_per_process_memory_fraction(0)
        with device.limit(budget):
            torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
            device.release()
            with pytest.raises(torch.OutOfMemoryError) as caught:
                torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
            assert device.out_of_memory(caught.value)
        assert torch.cuda.memory.get_per_process_memory_fraction(0) == before
        torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")

    def test_time_includes_queued_work(self, device):
        a = torch.randn(4096, 4096, device="cuda")
        seconds = device.time(lambda: [a @ a for _ in range(20)])  # type: ignore[arg-type, return-value]
        assert seconds > 20 * 2 * 4096**3 / 2e15
