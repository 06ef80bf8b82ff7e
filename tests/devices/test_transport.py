import errno
import os
import weakref

import pytest
import torch

from autockpt.devices import disk
from autockpt.devices.disk import CpuTransport
from autockpt.devices.transport import host_notes
from autockpt.errors import MeasurementError
from autockpt.schema import DeviceInfo, Environment
from tests.errors import raises
from tests.policies.deferred import DeferredDisk, DeferredTransport


def some_bytes(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["mapped file", "copy queues", "disk"])
def way(request, tmp_path, monkeypatch):
    if request.param == "disk":
        monkeypatch.setattr(disk, "PART_BYTES", 8192)  # so that storages have several parts
        return DeferredDisk(tmp_path)
    return CpuTransport(tmp_path) if request.param == "mapped file" else DeferredTransport()


def space_of(way):
    """The pool of what lies below the device."""
    return way.space if isinstance(way, DeferredDisk) else way.pool


def test_bytes_come_back(way):
    source = some_bytes(100_003)
    wanted, alive = source.clone(), weakref.ref(source)
    handle = way.send(source)
    assert handle.nbytes == 100_003
    handle.fetch()  # nothing to do yet
    assert handle.get().data_ptr() == source.data_ptr()  # it has not left
    del source
    assert alive() is not None
    for _ in range(2):
        handle.settle()
    assert alive() is None
    for _ in range(2):
        handle.fetch()
    first = handle.get()
    assert torch.equal(first, wanted)
    assert (first.untyped_storage().nbytes(), first.storage_offset()) == (100_003, 0)
    assert handle.get().data_ptr() == first.data_ptr()
    for _ in range(2):
        handle.release()
    assert torch.equal(first, wanted)  # what was given out stays valid
    first.zero_()
    assert torch.equal(handle.get(), wanted)


def test_handles_at_the_same_time_do_not_mix(way):
    handles = [way.send(some_bytes(5000, seed)) for seed in range(30)]
    for handle in handles:
        handle.settle()
    for seed in (3, 29, 0, 7):
        assert torch.equal(handles[seed].get(), some_bytes(5000, seed))


def test_host_memory_is_used_again(way):
    def step(sizes):
        handles = [way.send(some_bytes(size, i)) for i, size in enumerate(sizes)]
        for handle in handles:
            handle.settle()
        for i, (size, handle) in enumerate(zip(sizes, handles, strict=True)):
            assert torch.equal(handle.get(), some_bytes(size, i))

    step([70_000, 3, 70_000, 129])
    held = space_of(way).held_bytes
    assert held
    for _ in range(5):
        step([129, 70_000, 70_000, 3])
    assert space_of(way).held_bytes == held


# --- the mapped file


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with raises(MeasurementError, "No space left") as caught:
        CpuTransport(tmp_path).send(some_bytes(1000))
    assert str(tmp_path) in caught.value.message
    assert "TMPDIR" in caught.value.remedy


def test_a_full_disk_is_noticed_without_fallocate(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    way = CpuTransport(tmp_path)
    assert torch.equal(way.send(some_bytes(1000)).get(), some_bytes(1000))
    with pytest.raises(OSError, match="No space left"):
        disk.reserve(0, 1 << 60, str(tmp_path))


def test_a_file_without_a_name_in_a_folder_of_ones_own(tmp_path, monkeypatch):
    with raises(MeasurementError):
        CpuTransport(tmp_path / "gone").send(some_bytes(1000))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    way = CpuTransport()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    handles = [way.send(some_bytes(20_000, seed)) for seed in range(500)]
    assert way.directory == str(tmp_path) and list(tmp_path.iterdir()) == []
    assert not before or len(os.listdir("/proc/self/fd")) - before <= 2
    assert torch.equal(handles[7].get(), some_bytes(20_000, 7))


# --- copy queues


def test_copies_nobody_waited_for_are_reported_to_the_allocator():
    way = DeferredTransport()
    handle = way.send(some_bytes(1000))
    del handle
    assert way.queues.abandoned == 1000
    handle = way.send(some_bytes(500))
    handle.settle()
    handle.fetch()
    handle.release()
    assert way.queues.abandoned == 1500
    assert torch.equal(handle.get(), some_bytes(500))
    handle.release()
    assert way.queues.abandoned == 1500


def test_what_nobody_waited_for_has_ended_before_more_is_sent():
    """Else such buffers would pile up as long as copies are slower than the host."""
    way = DeferredTransport()
    left = (handle := way.send(some_bytes(1000)))._left
    del handle
    assert not left.done
    handle = way.send(some_bytes(500))
    assert left.done
    handle.settle()
    handle.fetch()
    arrived = handle._arrived
    handle.release()
    assert not arrived.done and way.send(some_bytes(10)) and arrived.done


def test_host_memory_is_not_overwritten_while_it_is_still_read():
    way = DeferredTransport()
    first = way.send(some_bytes(1000, 1))
    first.settle()
    first.fetch()
    arriving = first._back
    first._queues.record_stream = lambda buffer, direction: None
    event = first._arrived
    del first
    way.unwaited.clear()
    second = way.send(some_bytes(1000, 2))  # the same host memory
    second.settle()
    assert event.done
    assert torch.equal(arriving, some_bytes(1000, 1))
    assert torch.equal(second.get(), some_bytes(1000, 2))


@pytest.mark.parametrize(
    ("kind", "versions", "budget", "says"),
    [
        ("cuda", {}, None, ("6.00 GiB of pinned", "This host has", "--host-budget bounds")),
        ("cuda", {"simulated": "h100"}, None, ("6.00 GiB of pinned", "machine with the h100 is unknown")),
        ("cpu", {}, 8 << 30, ("6.00 GiB of host memory, in a mapped file", "--host-budget allows 8.00 GiB")),
    ],
)
def test_host_memory_of_a_plan_is_named(kind, versions, budget, says):
    where = Environment(device=DeviceInfo(kind=kind, name="x", capacity_bytes=1), versions=versions)
    (note,) = host_notes(where, 6 << 30, budget)
    assert all(text in note for text in says)
    assert host_notes(where, 0, budget) == ()
