"""Memory of NVIDIA GPUs as the driver's management library tells it, without opening a CUDA context. Bytes.

The library is called through ctypes, as ``torch.cuda`` does: its Python package (nvidia-ml-py) is none of PyTorch's.

Every function answers None where the library, the device or the number cannot be had; none raises. That includes what
would be another GPU's or not this process's: the library counts GPUs by their place on the bus, CUDA the fastest first
(unless CUDA_DEVICE_ORDER=PCI_BUS_ID) with unlike ones, so that the two only agree by UUID; and of a GPU that is divided
(MIG) it tells the whole one's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_MAX_PROCESSES = 256
_MAX_NAME = 96
# What the library writes where a process's memory is not known (for instance under Windows' own driver model).
_NOT_AVAILABLE = (1 << 64) - 1


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Memory2(ctypes.Structure):
    """Tells the driver's own part apart, which CUDA does not count as the device's memory."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class _Card:
    """A GPU as the library tells it."""

    library: Any
    handle: ctypes.c_void_p

    def memory(self) -> tuple[int, int] | None:
        """All of it and what is used, both without the driver's own part where the library tells that apart."""
        with contextlib.suppress(AttributeError):
            apart = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
            if self.library.nvmlDeviceGetMemoryInfo_v2(self.handle, ctypes.byref(apart)) == 0:
                return int(apart.total - apart.reserved), int(apart.used)
        memory = _Memory()
        if self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)) != 0:
            return None
        return int(memory.total), int(memory.used)

    def capability(self) -> tuple[int, int] | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        with contextlib.suppress(AttributeError):
            ask = self.library.nvmlDeviceGetCudaComputeCapability
            if ask(self.handle, ctypes.byref(major), ctypes.byref(minor)) == 0:
                return major.value, minor.value
        return None

    def name(self) -> bytes:
        name = ctypes.create_string_buffer(_MAX_NAME)
        self.library.nvmlDeviceGetName(self.handle, name, ctypes.c_uint(_MAX_NAME))
        return name.value

    def divided(self) -> bool:
        """Whether processes get parts of it (MIG). Older libraries, and GPUs that cannot be divided, do not say."""
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        with contextlib.suppress(AttributeError):
            if self.library.nvmlDeviceGetMigMode(self.handle, ctypes.byref(now), ctypes.byref(pending)) == 0:
                return bool(now.value)
        return False


def total_bytes(index: int) -> int | None:
    """All memory of the GPU that CUDA numbers ``index`` in this process, less what the driver keeps for itself."""
    return _memory(index)[0]


def used_bytes(index: int) -> int | None:
    """What all processes together hold on it."""
    return _memory(index)[1]


def processes(index: int) -> dict[int, int] | None:
    """Bytes that each process holds on it, contexts included, by process number. Containers may see those of the host,
    or none."""
    card = _card(index)
    if card is None or card.divided():
        return None
    count, found = ctypes.c_uint(_MAX_PROCESSES), (_Process * _MAX_PROCESSES)()
    try:
        if card.library.nvmlDeviceGetComputeRunningProcesses_v3(card.handle, ctypes.byref(count), found) != 0:
            return None
    except AttributeError:
        return None
    return {p.pid: int(p.used) for p in found[: count.value] if p.used != _NOT_AVAILABLE}


def capability(index: int) -> tuple[int, int] | None:
    """Its compute capability: (9, 0) for Hopper."""
    card = _card(index)
    return None if card is None else card.capability()


def _memory(index: int) -> tuple[int, int] | tuple[None, None]:
    card = _card(index)
    return (None, None) if card is None or card.divided() else card.memory() or (None, None)


def _card(index: int) -> _Card | None:
    """The GPU that CUDA numbers ``index``: by its UUID once CUDA has started, before by number where that is safe."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        if torch.cuda.is_initialized():
            name = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
            return _found(library, library.nvmlDeviceGetHandleByUUID, name)
        number = torch.cuda._get_nvml_device_index(index)  # through CUDA_VISIBLE_DEVICES, which renumbers for CUDA
        return _by_number(library, number) if _same_order(library) else None
    except (OSError, AttributeError, RuntimeError, AssertionError, IndexError):
        return None


def _found(library: Any, ask: Callable[..., int], key: Any) -> _Card | None:
    handle = ctypes.c_void_p()
    return _Card(library, handle) if ask(key, ctypes.byref(handle)) == 0 else None


def _by_number(library: Any, number: int) -> _Card | None:
    return _found(library, library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(number))


def _same_order(library: Any) -> bool:
    """Whether the library's numbers are CUDA's, CUDA_VISIBLE_DEVICES aside."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-"):  # names them, whatever their order
        return True
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return False
    cards = [_by_number(library, number) for number in range(count.value)]
    if any(card is None for card in cards):  # one that may not be used from here
        return False
    alike = {(card.name(), card.capability(), (card.memory() or (0, 0))[0]) for card in cards if card is not None}
    return len(alike) <= 1
