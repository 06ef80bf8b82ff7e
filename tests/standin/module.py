"""``torch.standin``: what PyTorch and this tool ask of a backend's module, and the stand-in's own switches."""

import ctypes
import importlib
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import rename_privateuse1_backend

NAME = "standin"
extension: Any = None  # the extension, once it is loaded


def register() -> None:
    """Make the stand-in this process's accelerator. PyTorch calls it at its own import."""
    global extension
    importlib.import_module("torch._meta_registrations")  # shapes that PyTorch works out in Python
    extension = importlib.import_module("standin_device")  # lies on the path beside the entry point
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    set_schedule(os.environ.get("STANDIN_SCHEDULE", "random:0"))
    if total := os.environ.get("STANDIN_BYTES"):
        extension.set_total_bytes(int(total))
        extension.set_limit_bytes(int(total))


def set_schedule(text: str) -> None:
    """eager, lazy, compute-late, copies-late, or random with a seed behind a colon: ``random:3``."""
    name, _, seed = text.partition(":")
    extension.set_schedule(name, int(seed or 0))


def races() -> list[str]:
    """What was found so far: pairs of accesses to the same bytes that nothing orders."""
    return extension.races()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return extension.is_initialized()


def init() -> None:
    extension.init()


def _lazy_init() -> None:
    """PyTorch calls it before the first tensor. Up to 2.11 it waits for no device of which it has not."""
    init()


def _is_in_bad_fork() -> bool:
    return extension.is_in_bad_fork()


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(index: Any) -> None:
    if torch.device(NAME, index).index if isinstance(index, int) else torch.device(index).index:
        raise RuntimeError("there is one stand-in")


def device(index: Any) -> AbstractContextManager[None]:
    """For code that makes a device current for a while; there is one."""
    return nullcontext()


def get_device_name(index: Any = None) -> str:
    return "an accelerator that runs late"


def synchronize(index: Any = None) -> None:
    torch.accelerator.synchronize()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    extension.seed(seed % 2**64)


manual_seed_all = manual_seed


def get_rng_state(index: Any = None) -> Tensor:
    """Seed and number of launches: 16 bytes."""
    words = (ctypes.c_uint64 * 2)(*extension.get_random())
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def set_rng_state(state: Tensor, index: Any = None) -> None:
    extension.set_random(*(ctypes.c_uint64 * 2).from_buffer_copy(bytes(state.tolist())))


def get_per_process_memory_fraction(index: Any = None) -> float:
    return extension.limit_bytes() / extension.total_bytes()


def set_per_process_memory_fraction(fraction: float, index: Any = None) -> None:
    """What the allocator may reserve, of all there is; beyond that is torch.OutOfMemoryError."""
    extension.set_limit_bytes(int(fraction * extension.total_bytes()))
