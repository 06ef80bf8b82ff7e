"""The device and the software versions that numbers were measured with."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data

WITHOUT_STREAMS = ("cpu", "mps")
"""Kinds of device whose copies wait their turn: PyTorch has a single stream there, or none."""


ALLOCATOR_SETTINGS = "allocator settings"
"""Where an environment's ``versions`` have them."""


class DeviceInfo(Data):
    """What identifies a device. ``capacity_bytes`` is all its memory, ``overhead_bytes`` what its context takes."""

    kind: str = Field(description="cpu, cuda, or what PyTorch calls it: xpu, npu")
    name: str
    capacity_bytes: int
    overhead_bytes: int = 0
    copy_queues: bool = Field(default=False, description="copies run concurrently with compute")
    enforces_limit: bool = Field(default=False, description="a budget can be a real limit of its allocator")
    threads: int | None = Field(default=None, description="intra-op threads, where the device is the CPU")


class Environment(Data):
    """Versions and machine: enough to judge whether two numbers may be compared."""

    device: DeviceInfo
    versions: dict[str, str] = Field(description="autockpt, python, torch, transformers, optuna")
    platform: str = ""
