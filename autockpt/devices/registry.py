"""The table of all kinds of device, and finding one by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from autockpt.devices.base import Device
from autockpt.devices.cpu import CpuDevice
from autockpt.devices.cuda import CudaDevice
from autockpt.errors import UsageError
from autockpt.schema.suggest import closest


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

    def process_environment(self) -> Mapping[str, str]:
        """Variables that a process measuring there should start with, where the user has not set them."""
        ...


# The best first. A new kind is one file and one line here.
DEVICES: dict[str, DeviceKind] = {
    "cuda": CudaDevice,
    "cpu": CpuDevice,
}


def process_environment(name: str | None) -> Mapping[str, str]:
    """The variables that a process measuring on the device of that name should start with; errors as ``get_device``."""
    return DEVICES[get_device(name).kind].process_environment()


def make_current(device: Device) -> None:
    """Events, graphs and seeds of this process are that accelerator's from now on. Opens its context."""
    if device.kind != "cpu":
        torch.accelerator.set_device_index(device.torch_device.index or 0)


def get_device(name: str | None = None) -> Device:
    """The device of that name ("cpu", "cuda", "cuda:1"); without a name the best there is. Initialises nothing.

    Raises UsageError for a name that is not known, or a device that is not there.
    """
    if name is None:
        return next(kind() for kind in DEVICES.values() if kind.count())
    kind_name, colon, number = name.partition(":")
    if kind_name not in DEVICES or (colon and not number.isdecimal()):
        near = closest(kind_name, DEVICES)
        meant = f" Did you mean {near}?" if near and near != kind_name else ""
        raise UsageError(
            f"unknown device {name!r}",
            remedy=f"Known devices: {', '.join(DEVICES)}; one of several is written cuda:1.{meant}",
        )
    kind, index = DEVICES[kind_name], int(number or 0)
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
