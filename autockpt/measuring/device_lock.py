"""Searches on one device take turns: a step that is timed beside another search's says little of either.

Who measures holds a lock on a file of the cache directory that is named after the device. The system gives it back when
the process ends, however it ends. Where the cache directory cannot be written nobody waits.
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
_held: set[str] = set()  # by this process, whose searches within a search wait for nobody


class DeviceBusy(MeasurementError):
    """Another search is measuring on the device, and this one was not to wait. Exit code 4."""

    code = "device.busy"
    default_remedy = "Leave --no-wait out: the search then begins when the other one has ended."


@contextmanager
def device_lock(device: Device, note: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Have the device to oneself among the searches of this user; ``note`` is told whom one waits for.

    Raises DeviceBusy where another search has it and ``wait`` is False.
    """
    with _alone(device.identity(), str(device.torch_device), note, wait):
        yield


@contextmanager
def host_link_lock(
    device_kind: str, plans: Iterable[Mapping[str, Choice]], note: Callable[[str], None]
) -> Iterator[None]:
    """Have the way to the host's memory to oneself as well, where one of these plans offloads from an accelerator.

    The GPUs of a host share it: two searches that offload at once would each measure half of it.
    """
    moves = any(choice.kind in MOVING for plan in plans for choice in plan.values())
    if not moves or device_kind == "cpu":
        yield
        return
    with _alone(f"{socket.gethostname()}-host-memory", "the memory of the host", note, True):
        yield


@contextmanager
def _alone(name: str, what: str, note: Callable[[str], None], wait: bool) -> Iterator[None]:
    told = ""

    def busy(holder: str) -> None:
        nonlocal told
        if not wait:
            raise DeviceBusy(f"{what} is in use by {holder}")
        if holder != told:
            told = holder
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
