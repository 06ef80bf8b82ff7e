"""Searches on one device take turns, in whatever processes they are, and whoever ends gives the device back."""

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from autockpt.devices import get_device
from autockpt.measuring.device_lock import DeviceBusy, device_lock, host_link_lock
from autockpt.schema import RECOMPUTE, Choice, parse_choice
from tests.errors import raises

processes = multiprocessing.get_context("fork")
CPU = get_device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path))


def hold(begun: Event, end: Event) -> None:
    with device_lock(CPU, print):
        begun.set()
        end.wait(60)


@pytest.fixture
def other() -> multiprocessing.process.BaseProcess:
    """Another process that measures on the CPU until it is killed."""
    begun = processes.Event()
    process = processes.Process(target=hold, args=(begun, processes.Event()), daemon=True)
    process.start()
    assert begun.wait(60)
    return process


def test_the_second_waits_until_the_first_has_ended_however_it_ends(other: multiprocessing.Process) -> None:
    notes: list[str] = []

    def told(note: str) -> None:
        notes.append(note)
        os.kill(other.pid or 0, signal.SIGKILL)

    with device_lock(CPU, told):
        assert len(notes) == 1 and f"process {other.pid}" in notes[0]


def test_who_does_not_wait_is_told_who_has_the_device(other: multiprocessing.Process) -> None:
    with raises(DeviceBusy, str(other.pid)), device_lock(CPU, print, wait=False):
        pass
    other.kill()


def test_a_search_within_a_search_waits_for_nobody() -> None:
    with device_lock(CPU, print):
        with device_lock(CPU, print, wait=False):
            pass
        with device_lock(CPU, print, wait=False):
            pass
    with device_lock(CPU, print, wait=False):
        pass


def test_plans_that_offload_from_an_accelerator_have_the_hosts_memory_alone() -> None:
    moving, staying = {"0": parse_choice("offload")}, {"0": RECOMPUTE}
    notes: list[str] = []

    def take(plans: list[dict[str, Choice]], kind: str, begin: Event, done: Event) -> None:
        assert begin.wait(60)
        with host_link_lock(kind, plans, print):
            done.set()

    for plans, kind, waits in (([staying, moving], "cuda", True), ([staying], "cuda", False), ([moving], "cpu", False)):
        begin, done = processes.Event(), processes.Event()
        other = processes.Process(target=take, args=(plans, kind, begin, done))
        other.start()
        with host_link_lock("cuda", [moving], notes.append):
            begin.set()
            assert done.wait(0.3 if waits else 60) is not waits
        other.join(60)
        assert done.is_set() and not notes
