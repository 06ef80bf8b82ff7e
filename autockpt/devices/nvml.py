"""Memory of NVIDIA GPUs as the driver's management library tells it, without opening a CUDA context. Bytes.

Every function answers None where the library, the device or the number cannot be had; none raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

_MAX_PROCESSES = 256
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


def total_bytes(index: int) -> int | None:
    """All memory of the GPU that CUDA numbers ``index`` in this process, less what the driver keeps for itself."""
    memory = _memory(index)
    return None if memory is None else memory[0]


def used_bytes(index: int) -> int | None:
    """What all processes together hold on it."""
    memory = _memory(index)
    return None if memory is None else memory[1]


def own_bytes(index: int) -> int | None:
    """What this process holds on it, its context included. None in containers that renumber processes."""
    opened = _open(index)
    if opened is None:
        return None
    library, handle = opened
    count, found = ctypes.c_uint(_MAX_PROCESSES), (_Process * _MAX_PROCESSES)()
    try:
        if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found) != 0:
            return None
    except AttributeError:
        return None
    for process in found[: count.value]:
        if process.pid == os.getpid() and process.used != _NOT_AVAILABLE:
            return int(process.used)
    return None


def capability(index: int) -> tuple[int, int] | None:
    """Its compute capability: (9, 0) for Hopper."""
    opened = _open(index)
    if opened is None:
        return None
    library, handle = opened
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        if library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
            return None
    except AttributeError:
        return None
    return major.value, minor.value


def _memory(index: int) -> tuple[int, int] | None:
    """All of it and what is used, both without the driver's own part where the library tells that apart."""
    opened = _open(index)
    if opened is None:
        return None
    library, handle = opened
    with contextlib.suppress(AttributeError):
        apart = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
        if library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(apart)) == 0:
            return int(apart.total - apart.reserved), int(apart.used)
    memory = _Memory()
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    return int(memory.total), int(memory.used)


def _open(index: int) -> tuple[Any, ctypes.c_void_p] | None:
    """The library and its handle of a GPU. CUDA_VISIBLE_DEVICES renumbers for CUDA, not for this library."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        handle = ctypes.c_void_p()
        number = torch.cuda._get_nvml_device_index(index)
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)) != 0:
            return None
        return library, handle
    except (OSError, AttributeError, RuntimeError, AssertionError, IndexError):
        return None
