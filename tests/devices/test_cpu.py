"""The CPU's peak is exact to the byte, equal to sums done by hand, whatever happened before."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autockpt.devices.cpu import CpuDevice, waited_for_core
from autockpt.devices.disk import CpuTransport

FLOAT = 4


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice()


def test_peak_of_allocations_by_hand(device):
    kept = []

    def fn() -> None:
        a = torch.empty(1000)  # 4000 alive
        b = torch.empty(250)  # 5000
        del a  # 1000
        kept.append(torch.empty(800))  # 4200
        del b

    assert device.measure_peak(fn, resident=0).peak_bytes == 5000
    assert device.measure_peak(fn, resident=10**6).peak_bytes == 10**6 + 5000
    assert device.measure_peak(fn, resident=0).allocated_bytes is None


def test_releases_of_earlier_blocks_do_not_lower_the_peak(device):
    """Blocks of an earlier recording leave their sizes behind in the profiler; their addresses are used again."""
    before = []

    def fill() -> None:
        before.extend(torch.empty(5000) for _ in range(50))

    device.measure_peak(fill, resident=0)
    before.clear()
    old = [torch.empty(5000) for _ in range(50)]  # now at addresses of which the profiler has old sizes

    def fn() -> None:
        old.clear()
        torch.empty(3000)

    assert device.measure_peak(fn, resident=50 * 5000 * FLOAT).peak_bytes == (50 * 5000 + 3000) * FLOAT


def test_memory_mapped_bytes_are_not_counted(device, tmp_path):
    way = CpuTransport(tmp_path)
    source = torch.arange(1 << 18, dtype=torch.uint8)
    handles = []
    assert device.measure_peak(lambda: handles.append(way.send(source)), resident=0).peak_bytes < 1 << 10
    handles[0].settle()
    assert torch.equal(handles[0].get(), source)


def test_errors_pass_through_and_leave_the_meter_usable(device):
    def fails() -> None:
        torch.empty(10)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        device.measure_peak(fails, resident=0)
    assert device.measure_peak(lambda: None, resident=7).peak_bytes == 7


@pytest.mark.slow
def test_the_profiler_prints_nothing():
    """In a process of its own: how much is printed is decided when a process first profiles, and other tests do."""
    program = "from autockpt.devices.cpu import CpuDevice\nCpuDevice().measure_peak(lambda: None, resident=0)\n"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_out_of_memory_is_told_from_other_errors(device):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46)
    assert device.out_of_memory(caught.value)
    assert device.out_of_memory(MemoryError())
    assert device.out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not device.out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not device.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not device.out_of_memory(KeyboardInterrupt())


def test_description(device):
    info = device.describe()
    assert (info.kind, info.copy_queues, info.overhead_bytes) == ("cpu", False, 0)
    assert info.name
    assert info.threads == torch.get_num_threads()
    assert info.capacity_bytes == device.capacity() > device.used_by_others() >= 0


def test_waiting_for_a_core_that_others_use_is_no_part_of_a_step(device, monkeypatch):
    waits = iter([5.0, 5.75, 5.0, 65.0])  # the second time a minute, most of it outside of the step
    seconds, worked = iter([10.0, 11.0] * 2), iter([3.0, 3.125] * 2)
    monkeypatch.setattr("autockpt.devices.cpu.waited_for_core", lambda: next(waits))
    monkeypatch.setattr("autockpt.devices.cpu.time.perf_counter", lambda: next(seconds))
    monkeypatch.setattr("autockpt.devices.cpu.time.thread_time", lambda: next(worked))
    assert device.time(lambda: None) == pytest.approx(0.25)
    assert device.time(lambda: None) == 0.125  # no less than what the processor worked


def test_waiting_is_known_for_one_thread_and_never_shrinks():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert waited_for_core() is None
        torch.set_num_threads(1)
        first = waited_for_core()
        if first is None:
            pytest.skip("the system keeps no scheduler statistics")
        assert 0 <= first <= (waited_for_core() or 0)
    finally:
        torch.set_num_threads(threads)
