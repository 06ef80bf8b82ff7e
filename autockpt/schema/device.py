"""The device and the software a number was measured on, and the most that a step holds there."""

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


class DevicePeak(Data):
    """Bytes at the worst moment of a step on a device, as modelled."""

    allocated: int = Field(description="tensors, in whole blocks of the allocator")
    reserved: int = Field(description="what the allocator took of the device for them")
    context: int = Field(default=0, description="what driver, context and kernels hold outside it")
    workspace: int = Field(default=0, description="the part of `allocated` that matrix libraries keep")
    fits: bool = Field(default=True, description="whether a run within the limit gets through")

    @property
    def total(self) -> int:
        """What counts against a budget: reserved bytes and context."""
        return self.reserved + self.context
