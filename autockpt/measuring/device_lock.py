"""A lock per device, so that searches measure one after the other: steps that are timed at the same time are slower.

It is a file lock in the cache directory, which the system releases when the process ends. Without a writable cache
directory there is no lock.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from autockpt.devices import Device
from autockpt.errors import MeasurementError
from autockpt.policies.offload import MOVING
from autockpt.schema.choices import Choice
from autockpt.schema.files import cache_directory, locked, open_in_place

POLL_SECONDS = 0.25
_held: set[str] = set()  # locks of this process, whose nested searches do not wait


class DeviceBusy(MeasurementError):
    """Another search is measuring on the device, and this one was not to wait. Exit code 4."""

    code = "device.busy"
    default_remedy = "Leave --no-wait out: the search then begins when the other one has ended."


@contextmanager
def device_lock(device: Device, note: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Lock the device against other searches of this user; ``note`` is told which process is waited for.

    Raises DeviceBusy where another search has it and ``wait`` is False.
    """
    with _alone(device.identity(), str(device.torch_device), note, wait):
        yield


@contextmanager
def host_link_lock(
    device_kind: str, plans: Iterable[Mapping[str, Choice]], note: Callable[[str], None]
) -> Iterator[None]:
    """Lock the link to the host's memory as well, if one of these plans offloads from an accelerator.

    The GPUs of a host share it: two searches that offload at the same time would each measure half its bandwidth.
    """
    moves = any(choice.kind in MOVING for plan in plans for choice in plan.values())
    if not moves or device_kind == "cpu":
        yield
        return
    with _alone(f"{socket.gethostname()}-host-memory", "the memory of the host", note, True):
        yield


@contextmanager
def _alone(name: str, what: str, note: Callable[[str], None], wait: bool) -> Iterator[None]:
    noted = ""

    def busy(holder: str) -> None:
        nonlocal noted
        if not wait:
            raise DeviceBusy(f"{what} is in use by {holder}")
        if holder != noted:
            noted = holder
            note(f"waiting for {what}, in use by {holder}")
        time.sleep(POLL_SECONDS)

    path, descriptor = cache_directory() / "devices" / f"{name}.lock", None
    if name not in _held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_in_place(path)
    if descriptor is None:
        yield
        return
    with locked(descriptor, busy):
        _held.add(name)
        try:
            yield
        finally:
            _held.discard(name)
