"""The table of all kinds of device, and finding one by name."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from autockpt.devices.accelerator import AcceleratorDevice
from autockpt.devices.cpu import CpuDevice
from autockpt.devices.cuda import CudaDevice
from autockpt.errors import UsageError
from autockpt.schema.base import did_you_mean
from autockpt.schema.device import WITHOUT_STREAMS

Device = CpuDevice | AcceleratorDevice
"""Clocks, memory and failure of one device, in bytes and seconds: what both kinds answer."""

# Kinds with a file of their own, the best first. All others that PyTorch has a module for are AcceleratorDevices.
DEVICES: dict[str, Callable[[int], Device]] = {"cuda": CudaDevice, "cpu": lambda index: CpuDevice()}


def make_current(device: Device) -> None:
    """Events, graphs and seeds of this process are that accelerator's from now on. Opens its context."""
    if device.kind != "cpu":
        torch.accelerator.set_device_index(device.torch_device.index or 0)


def get_device(name: str | None = None) -> Device:
    """The device of that name ("cpu", "cuda:1", "xpu", "npu"); without a name the best there is. Initialises nothing.

    Without a number it is the one that a launcher gave this process by LOCAL_RANK, as far as there are so many; else
    the first.
    The kind is one of ``DEVICES``, or any other that PyTorch has a module for, registered backends included: those are
    served by PyTorch's generic accelerator API. Raises UsageError for a name that is not known, or a device that is not
    there.
    """
    if name is None:
        name = next(filter(_count, _known()))
    kind, colon, number = name.partition(":")
    if not (kind in DEVICES or _has_module(kind)) or (colon and not number.isdecimal()):
        known = _known()
        meant = "" if kind in known else did_you_mean(kind, known)
        raise UsageError(
            f"unknown device {name!r}",
            remedy=f"{meant}Known devices: {', '.join(known)}; one of several is written cuda:1.",
        )
    there = _count(kind)
    if not there:
        raise UsageError(
            f"there is no {kind} device here: {_absence(kind)}",
            remedy="Use the device cpu, or leave the device out to take the best there is.",
        )
    rank = os.environ.get("LOCAL_RANK", "")
    # the first where a launcher shows each process its own one alone
    own = int(rank) if rank.isdecimal() and int(rank) < there else 0
    index = int(number) if colon else own
    if index >= there:
        last = f"{kind}:{there - 1}" if there > 1 else kind
        raise UsageError(f"there is no device {name}: the last one here is {last}", remedy=f"Use {last}.")
    return DEVICES[kind](index) if kind in DEVICES else AcceleratorDevice(kind, index)


def _known() -> list[str]:
    """The table, after an accelerator of another kind that PyTorch has, if it has streams."""
    accelerator = _accelerator()
    return list(DEVICES) if accelerator in (None, *DEVICES, *WITHOUT_STREAMS) else [accelerator, *DEVICES]


def _accelerator() -> str | None:
    """The kind of accelerator that this PyTorch has."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _has_module(kind: str) -> bool:
    """Whether PyTorch knows it as a kind that steps could run on."""
    try:
        return hasattr(torch.get_device_module(kind), "device_count")
    except (RuntimeError, AttributeError):
        return False


def _count(kind: str) -> int:
    """How many there are here, without initialising them."""
    if kind == "cpu":
        return 1
    if kind == "cuda":
        return torch.cuda.device_count()
    return torch.accelerator.device_count() if kind == _accelerator() else 0


def _absence(kind: str) -> str:
    """Why there is none, for people."""
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    if kind == "cuda":
        return "PyTorch sees no NVIDIA GPU (no driver, or CUDA_VISIBLE_DEVICES hides it)"
    if kind == _accelerator():
        return f"PyTorch's {kind} backend sees none"
    has = f"has {_accelerator()} as its accelerator" if _accelerator() else "has no accelerator"
    return f"this PyTorch ({torch.__version__}) {has}"
