"""The disk tier of an accelerator: real files, a real thread, and copies that only take place when waited for."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from autockpt.devices import disk, scratch
from autockpt.devices.hostpool import HostUse
from autockpt.errors import HostBudgetExceeded, MeasurementError
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
        way.run(lambda staging: self.open.wait(60) and None)


def test_bytes_are_in_the_file_and_not_in_memory(tmp_path):
    way = DeferredDisk(tmp_path)
    handle = way.send(some_bytes())
    handle.settle()
    way.drain()
    room = handle._piece.memory
    page = mmap.mmap(-1, PART)  # whole pages, as a file that is open for direct access asks for
    assert os.preadv(room.file.fileno(), [page], room.start) == PART
    assert bytes(page) == some_bytes()[:PART].numpy().tobytes()
    for half in way._staging:
        half.memory.zero_()
    assert torch.equal(handle.get(), some_bytes())


def test_sending_does_not_wait_for_the_disk(tmp_path):
    way = DeferredDisk(tmp_path)
    gate = Gate(way)
    source = some_bytes()
    handle = way.send(source)
    assert handle.get() is source
    gate.open.set()
    handle.settle()
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
    buffer = first._in.buffer
    place = first._piece.memory.start
    job = first._in
    second = way.send(some_bytes(seed=2))
    del first  # its place goes to the third
    third = way.send(some_bytes(seed=3))
    assert third._piece.memory.start == place
    gate.open.set()
    for handle, seed in ((second, 2), (third, 3)):
        handle.settle()
        assert torch.equal(handle.get(), some_bytes(seed=seed))
    assert job.cancelled and buffer is not None


def test_buffers_that_nobody_waited_for_are_reported_or_finished(tmp_path):
    way = DeferredDisk(tmp_path)
    handle = way.send(some_bytes())
    handle.settle()
    handle.fetch()
    way.drain()
    handle.release()
    assert way.queues.abandoned == N
    assert torch.equal(handle.get(), some_bytes())
    handle.release()
    assert way.queues.abandoned == N


def test_a_disk_that_fills_up_is_an_error_and_no_wrong_bytes(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    real, calls = os.pwrite, []

    def full(fd, data, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    handle = way.send(some_bytes())
    with raises(MeasurementError, "No space left") as caught:
        handle.settle()
        handle.get()
    assert str(tmp_path) in caught.value.message and "AUTOCKPT_OFFLOAD_DIR" in caught.value.remedy
    monkeypatch.undo()


def test_an_error_in_the_last_part_is_not_lost(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    real = os.pwrite
    last = (N - 1) // PART * PART

    def failing(fd, data, offset):
        if offset >= last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    handle = way.send(some_bytes())
    handle.settle()  # all parts have left the device
    with raises(MeasurementError, "Input/output error"):
        handle.get()


def test_an_unreadable_file_is_an_error(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    handle = way.send(some_bytes())
    handle.settle()
    way.drain()
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: 0)
    with raises(MeasurementError):
        handle.get()


def test_writes_and_reads_in_pieces(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:4096], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:4096]], offset))
    for seed in range(3):
        round_trip(way, seed)


def test_other_alignments_get_ordinary_writes(tmp_path, monkeypatch):
    way = DeferredDisk(tmp_path)
    handle = way.send(some_bytes())
    handle.settle()
    way.drain()
    file = handle._piece.memory.file
    before = disk.fcntl.fcntl(file.fileno(), disk.fcntl.F_GETFL)
    if not before & os.O_DIRECT:
        pytest.skip("no direct way on this file system")
    assert disk._leave_direct(file)
    assert not disk._leave_direct(file)
    assert torch.equal(handle.get(), some_bytes())


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv(scratch.FOLDER, str(tmp_path / "gone"))
    with raises(MeasurementError) as caught:
        DeferredDisk().send(some_bytes())
    assert str(tmp_path / "gone") in caught.value.message


def test_a_full_disk_is_noticed_before_anything_leaves(tmp_path, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    way = DeferredDisk(tmp_path)
    with raises(MeasurementError, "No space left"):
        way.send(some_bytes())
    assert way.queues.sent == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_behind(tmp_path, end):
    program = (
        "import sys, os, torch\n"
        "from tests.policies.deferred import DeferredDisk\n"
        "p = DeferredDisk(sys.argv[1]).send(torch.ones(1 << 20, dtype=torch.uint8)); p.settle()\n"
        "assert not os.listdir(sys.argv[1])\n"
        "os.kill(os.getpid(), int(sys.argv[2]))\n"
        "import time; time.sleep(60)\n"
    )
    root = Path(disk.__file__).parents[2]
    command = [sys.executable, "-c", program, str(tmp_path), str(int(end))]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == -end
    assert list(tmp_path.iterdir()) == []


def test_pinned_memory_is_two_parts_whatever_is_sent(tmp_path):
    use = HostUse()
    way = DeferredDisk(tmp_path, use)
    for seed in range(4):
        round_trip(way, seed, n=200_000)
    assert use.peak == use.bytes == 2 * PART
    assert way.space.held_bytes >= 200_000


def test_the_host_budget_holds_for_it(tmp_path):
    use = HostUse(8 * 4096)
    round_trip(DeferredDisk(tmp_path, use), 0, n=200_001)  # parts of a page
    assert use.peak == 2 * 4096
    with pytest.raises(HostBudgetExceeded):
        DeferredDisk(tmp_path, HostUse(4096))
