"""The table of all kinds of device, and finding one by name."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from autockpt.devices.accelerator import AcceleratorKind
from autockpt.devices.base import Device
from autockpt.devices.cpu import CpuDevice
from autockpt.devices.cuda import CudaDevice
from autockpt.errors import UsageError
from autockpt.schema.base import closest
from autockpt.schema.device import WITHOUT_STREAMS


class DeviceKind(Protocol):
    """What the table holds: a class that makes the n-th device of its kind and knows how many there are."""

    def __call__(self, index: int = 0) -> Device:
        """The n-th device of this kind. Initialises nothing."""
        ...

    def count(self) -> int:
        """How many there are here, without initialising them."""
        ...

    def absence(self) -> str:
        """Why there is none, for people."""
        ...


# Kinds with a file of their own, the best first. All others that PyTorch has a module for are AcceleratorDevices.
DEVICES: dict[str, DeviceKind] = {
    "cuda": CudaDevice,
    "cpu": CpuDevice,
}


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
        return next(kind(_own_index(kind)) for kind in map(_kind, _known()) if kind is not None and kind.count())
    kind_name, colon, number = name.partition(":")
    kind = _kind(kind_name)
    if kind is None or (colon and not number.isdecimal()):
        known = _known()
        near = closest(kind_name, known)
        meant = f" Did you mean {near}?" if near and near != kind_name else ""
        raise UsageError(
            f"unknown device {name!r}",
            remedy=f"Known devices: {', '.join(known)}; one of several is written cuda:1.{meant}",
        )
    index = int(number) if colon else _own_index(kind)
    there = kind.count()
    if not there:
        raise UsageError(
            f"there is no {kind_name} device here: {kind.absence()}",
            remedy="Use the device cpu, or leave the device out to take the best there is.",
        )
    if index >= there:
        last = f"{kind_name}:{there - 1}" if there > 1 else kind_name
        raise UsageError(f"there is no device {name}: the last one here is {last}", remedy=f"Use {last}.")
    return kind(index)


def _own_index(kind: DeviceKind) -> int:
    """Which of these devices is this process's; the first where a launcher shows each process its own one alone."""
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() and int(rank) < kind.count() else 0


def _known() -> list[str]:
    """The table, after an accelerator of another kind that PyTorch has, if it has streams."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in (*DEVICES, *WITHOUT_STREAMS):
        return list(DEVICES)
    return [accelerator.type, *DEVICES]


def _kind(name: str) -> DeviceKind | None:
    """The kind of that name; None where neither the table nor PyTorch knows one that steps could run on."""
    if name in DEVICES:
        return DEVICES[name]
    try:
        module = torch.get_device_module(name)
    except (RuntimeError, AttributeError):
        return None
    return AcceleratorKind(name) if hasattr(module, "device_count") else None
