"""The shipped description of the card that a check runs on."""

from __future__ import annotations

from autockpt.schema import Hardware
from autockpt.shipped import list_hardware, load_hardware


def described_like(device_name: str, kind: str, memory_bytes: int) -> Hardware | None:
    """The shipped description of the same card, by the name a driver gives it and its memory; None where none is."""
    name = "".join(c for c in device_name.lower() if c.isalnum())
    if kind == "cpu":
        return load_hardware("cpu")
    for hardware in map(load_hardware, list_hardware()):
        alike = hardware.name.partition("-")[0] in name
        near = memory_bytes > 0 and abs(hardware.memory_bytes / memory_bytes - 1) < 0.15
        if hardware.kind == kind and alike and near:
            return hardware
    return None
