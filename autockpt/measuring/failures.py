"""Out-of-memory errors of measured steps: translate them, and release the memory that their frames hold."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from autockpt.devices import Device
from autockpt.errors import AutockptError, DeviceOutOfMemory


@contextmanager
def releasing_memory(device: Device, what: str) -> Iterator[None]:
    """Turn the device's out-of-memory error into ours, after releasing all memory that its frames and caches hold."""
    try:
        yield
        return
    except BaseException as error:
        if not device.out_of_memory(error):
            raise
        first_line = str(error).strip().split("\n")[0] or type(error).__name__
        translated = DeviceOutOfMemory(f"{what} ran out of memory on {device.torch_device}: {first_line}")
        forget_frames(error)
    device.release()
    raise translated from None


def device_lost(error: BaseException) -> bool:
    """Whether a device has failed for good, as CUDA and HIP report a kernel's error on every later call."""
    foreign = isinstance(error, RuntimeError) and not isinstance(error, AutockptError)
    return foreign and ("CUDA error" in str(error) or "HIP error" in str(error))


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of all frames of an exception and of its causes.

    They hold the step's activations: without this, memory that ran out stays full for as long as the exception lives.
    """
    for one in chained(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def chained(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and contexts, and exceptions that a compiler wrapped in it."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]
