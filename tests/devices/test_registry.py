"""Devices by name."""

import pytest
import torch

from autockpt.devices import DEVICES, Device, get_device
from autockpt.errors import UsageError
from tests.errors import raises


def test_the_best_is_a_gpu_where_there_is_one_and_a_cpu_is_always_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert get_device().torch_device == torch.device("cuda", 0)
    assert get_device("cuda:1").torch_device == torch.device("cuda", 1)
    assert not torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in (None, "cpu", "cpu:0"):
        device = get_device(name)
        assert isinstance(device, Device)
        assert (device.kind, device.torch_device) == ("cpu", torch.device("cpu"))


@pytest.mark.parametrize(("rank", "index"), [("1", 1), ("0", 0), ("7", 0), ("", 0), ("-1", 0), ("x", 0)])
def test_a_launcher_says_which_device_is_this_process_s(monkeypatch, rank, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert get_device().torch_device == get_device("cuda").torch_device == torch.device("cuda", index)
    assert get_device("cuda:0").torch_device == torch.device("cuda", 0)
    assert get_device("cpu").torch_device == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "", "cpu:", "CUDA"])
def test_unknown_names_list_the_known(name):
    with raises(UsageError) as caught:
        get_device(name)
    assert all(kind in caught.value.remedy for kind in DEVICES)


def test_a_device_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with raises(UsageError, "CUDA") as caught:
        get_device("cuda")
    assert "cpu" in caught.value.remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with raises(UsageError, "NVIDIA"):
        get_device("cuda:0")


def test_a_number_too_high_names_the_last(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError) as caught:
        get_device("cuda:2")
    assert "cuda:1" in caught.value.remedy
    with raises(UsageError, "cpu:1"):
        get_device("cpu:1")
