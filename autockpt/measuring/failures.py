"""Failures of measured steps: what to say about them, how to let go of the memory they hold, how to send them on."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import autockpt.errors as errors
from autockpt.devices import Device
from autockpt.errors import AutockptError, DeviceOutOfMemory, MeasurementError

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TRIED = re.compile(r"(?:[Tt]ried to allocate|Requested size:) (\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB|TiB)")


@contextmanager
def letting_go(device: Device, what: str) -> Iterator[None]:
    """Turn the device's out-of-memory error into ours, after letting go of all that its frames and caches hold."""
    try:
        yield
        return
    except BaseException as error:
        if not device.out_of_memory(error):
            raise
        translated = out_of_memory_error(error, f"{what} ran out of memory on {device.torch_device}")
        forget_frames(error)
    device.release()
    raise translated from None


def device_lost(error: BaseException) -> bool:
    """Whether a device has failed for good: CUDA and HIP report an error of one kernel on every call from then on."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, AutockptError)
        and any(text in str(error) for text in ("CUDA error", "HIP error"))
    )


def needed_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, as PyTorch's messages give it; None where they do not."""
    match = _TRIED.search(str(error))
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of every frame that an exception, or one it came from, passed through.

    They hold the step's activations: without this, memory that ran out stays full for as long as the exception lives.
    """
    for one in chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def out_of_memory_error(error: BaseException, where: str) -> DeviceOutOfMemory:
    """A DeviceOutOfMemory in place of the device's own error, which can then be forgotten."""
    if isinstance(error, DeviceOutOfMemory):
        return DeviceOutOfMemory(error.message, remedy=error.remedy, needed=error.needed)
    first_line = str(error).strip().split("\n")[0] or type(error).__name__
    return DeviceOutOfMemory(f"{where}: {first_line}", needed=needed_bytes(error))


def to_wire(error: AutockptError) -> dict[str, Any]:
    """An error as JSON-able data."""
    data: dict[str, Any] = {"class": type(error).__name__, "message": error.message, "remedy": error.remedy}
    for name in ("needed", "smallest_peak"):
        if hasattr(error, name):
            data[name] = getattr(error, name)
    return data


def from_wire(data: dict[str, Any]) -> AutockptError:
    """The error that ``to_wire`` wrote; of an unknown class: MeasurementError."""
    cls = getattr(errors, str(data.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, AutockptError)):
        cls = MeasurementError
    known = {name: data[name] for name in ("needed", "smallest_peak") if name in data}
    return cls(data["message"], remedy=data.get("remedy"), **known)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that it was raised from, or while handling, or that a compiler wrapped in it."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]
