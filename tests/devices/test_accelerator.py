"""Kinds of accelerator without a file of their own, with the generic API answered by notes."""

import pytest
import torch

from autockpt.devices import Device, get_device
from autockpt.devices.accelerator import AcceleratorDevice, kinds_in_use
from autockpt.errors import MeasurementError, UsageError
from tests.accelerator import GIB, KIND
from tests.errors import raises


def test_a_kind_that_pytorch_has_is_found_and_the_best(accelerator):
    device = get_device(f"{KIND}:1")
    assert isinstance(device, Device)
    assert (device.kind, device.torch_device) == (KIND, torch.device(KIND, 1))
    assert get_device().kind == KIND
    assert get_device(KIND).environment == {}
    assert not accelerator.opened and not kinds_in_use()
    for wrong in (f"{KIND}:2", "mtia"):
        with raises(UsageError, KIND):
            get_device(wrong)


def test_a_kind_without_streams_is_never_the_best_by_itself(accelerator, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert get_device().kind == "cpu"


def test_memory_by_the_generic_api(accelerator):
    device = AcceleratorDevice(KIND)
    info = device.describe()
    assert (info.name, info.capacity_bytes, info.overhead_bytes) == ("card 0", 16 * GIB, 0)
    assert info.copy_queues and info.enforces_limit
    assert device.used_by_others() == GIB
    assert device.memory() == (0, 0, 2 * GIB, 3 * GIB, 4, 15 * GIB)
    peak = device.measure_peak(lambda: accelerator.calls.append("run"), resident=5)
    assert (peak.peak_bytes, peak.allocated_bytes) == (3 * GIB, GIB)
    assert accelerator.calls == ["wait", "reset peaks", "run", "wait"]
    accelerator.calls.clear()
    assert device.time(lambda: accelerator.calls.append("run")) >= 0
    assert accelerator.calls == ["wait", "run", "wait"]


def test_a_budget_is_a_share_where_the_backend_sets_one(accelerator):
    device = AcceleratorDevice(KIND)
    with device.limit(4 * GIB):
        assert accelerator.share == 0.25
    assert accelerator.share == 1.0
    accelerator.share = 0.1  # the user's own limit is lower
    with pytest.raises(KeyError), device.limit(4 * GIB):
        assert accelerator.share == 0.1
        raise KeyError
    assert accelerator.share == 0.1
    del accelerator.module.set_per_process_memory_fraction  # elsewhere it is compared after measuring
    with device.limit(GIB):
        assert accelerator.share == 0.1
    assert not device.describe().enforces_limit


def test_an_allocator_that_tells_no_peak_is_refused_by_name(accelerator, monkeypatch):
    def missing(device: torch.device) -> None:
        raise RuntimeError("Allocator for xpu is not a DeviceAllocator.")

    for answer in (missing, lambda device: {}):
        monkeypatch.setattr(torch.accelerator, "memory_stats", answer)
        with raises(MeasurementError, KIND):
            AcceleratorDevice(KIND).describe()


def test_release_opens_nothing(accelerator):
    device = AcceleratorDevice(KIND)
    device.release()
    assert accelerator.calls == [] and not accelerator.opened
    accelerator.opened = True
    device.release()
    assert accelerator.calls == ["empty cache", "reset peaks"]
