"""The disk tier of an accelerator: real files, a real thread, and copies that only take place when waited for."""

import errno
import gc
import mmap
import os
import signal
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from autockpt.devices import disk
from autockpt.devices.hostpool import HostUse
from autockpt.errors import HostBudgetExceeded, MeasurementError
from autockpt.process import ChildDied
from tests.children import forked
from tests.errors import raises
from tests.policies.deferred import DeferredDisk

PART = 8192
N = 3 * PART + 77  # three parts and a bit


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(disk, "PART_BYTES", PART)


def some_bytes(n: int = N, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def round_trip(way: DeferredDisk, seed: int, n: int = N) -> None:
    handle = way.send(some_bytes(n, seed))
    handle.settle()
    assert torch.equal(handle.get(), some_bytes(n, seed))


class Gate:
    """Holds the thread of a transport up."""

    def __init__(self, way: DeferredDisk) -> None:
        self.open = threading.Event()
        way.thread.submit(self.open.wait, 60)


def test_bytes_are_in_the_file_and_not_in_memory(tmp_path):
    way = DeferredDisk(tmp_path)
    handle = way.send(some_bytes())
    handle.settle()
    way.drain()
    room = handle._piece.memory
    page = mmap.mmap(-1, PART)  # whole pages, as a file that is open for direct access asks for
    assert os.preadv(room.file.fileno(), [page], room.start) == PART
    assert bytes(page) == some_bytes()[:PART].numpy().tobytes()
    way._staging.zero_()
    assert torch.equal(handle.get(), some_bytes())


def test_fetching_does_not_wait_either_and_getting_does(tmp_path):
    way = DeferredDisk(tmp_path)
    handle = way.send(some_bytes())
    handle.settle()
    gate = Gate(way)
    handle.fetch()
    threading.Timer(0.05, gate.open.set).start()
    assert torch.equal(handle.get(), some_bytes())


def test_the_source_lives_until_its_last_part_has_left(tmp_path):
    way = DeferredDisk(tmp_path)
    gate = Gate(way)
    source = some_bytes()
    alive = weakref.ref(source)
    handle = way.send(source)
    del source, handle  # as an exception in the forward would
    assert alive() is not None
    gate.open.set()
    way.drain()
    gc.collect()
    assert alive() is None
    assert way.pieces_in_use() == 0
    round_trip(way, 1)


def test_a_place_that_is_used_again_is_not_overwritten_too_early(tmp_path):
    way = DeferredDisk(tmp_path)
    first = way.send(some_bytes(seed=1))
    first.settle()
    gate = Gate(way)
    first.fetch()
    place, first._read = first._piece.memory.start, SimpleNamespace(cancel=lambda: False)  # as when it has begun
    second = way.send(some_bytes(seed=2))
    del first  # its place goes to the third
    third = way.send(some_bytes(seed=3))
    assert third._piece.memory.start == place
    gate.open.set()
    for handle, seed in ((second, 2), (third, 3)):
        handle.settle()
        assert torch.equal(handle.get(), some_bytes(seed=seed))


def test_a_disk_that_fills_up_is_an_error_and_no_wrong_bytes(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    real, calls = os.pwritev, []

    def full(fd, views, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)
    handle = way.send(some_bytes())
    with raises(MeasurementError, "No space left") as caught:
        handle.settle()
        handle.get()
    assert str(tmp_path) in caught.value.message and "AUTOCKPT_OFFLOAD_DIR" in caught.value.remedy
    monkeypatch.undo()


def test_writes_and_reads_in_pieces(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: write(fd, [views[0][:4096]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:4096]], offset))
    for seed in range(3):
        round_trip(way, seed)


def test_nothing_is_left_behind_by_a_process_that_is_killed(tmp_path):
    def work(say):
        DeferredDisk(tmp_path).send(some_bytes()).settle()
        say(os.listdir(tmp_path))
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(work)
    assert child.receive(60) == []
    with pytest.raises(ChildDied):
        child.receive()
    assert list(tmp_path.iterdir()) == []


def test_pinned_memory_is_one_part_whatever_is_sent(tmp_path):
    use = HostUse()
    way = DeferredDisk(tmp_path, use)
    for seed in range(4):
        round_trip(way, seed, n=200_000)
    assert use.peak == use.bytes == PART
    assert way.space.held_bytes >= 200_000


def test_the_host_budget_holds_for_it(tmp_path):
    use = HostUse(8 * 4096)
    round_trip(DeferredDisk(tmp_path, use), 0, n=200_001)  # parts of a page
    assert use.peak == 2 * 4096
    with pytest.raises(HostBudgetExceeded):
        DeferredDisk(tmp_path, HostUse(4095))
