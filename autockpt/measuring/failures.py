"""Failures of measured steps: what to say about them, and how to let go of the memory they hold."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from autockpt.devices import Device
from autockpt.errors import AutockptError, DeviceOutOfMemory


@contextmanager
def releasing_memory(device: Device, what: str) -> Iterator[None]:
    """Turn the device's out-of-memory error into ours, after letting go of all that its frames and caches hold."""
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
    """Whether a device has failed for good: CUDA and HIP report an error of one kernel on every call from then on."""
    foreign = isinstance(error, RuntimeError) and not isinstance(error, AutockptError)
    return foreign and ("CUDA error" in str(error) or "HIP error" in str(error))


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of every frame that an exception, or one it came from, passed through.

    They hold the step's activations: without this, memory that ran out stays full for as long as the exception lives.
    """
    for one in chained(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def chained(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that it was raised from, or while handling, or that a compiler wrapped in it."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]
