"""The host budget: held by the pools as a real bound, and foretold on paper."""

import itertools
import os
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.devices import host_bytes_of
from autockpt.devices.disk import CpuTransport
from autockpt.devices.hostpool import AREA_BYTES, HostUse, Pool, file_area, pinned_area
from autockpt.devices.transport import OffloadTransports
from autockpt.errors import HostBudgetExceeded
from autockpt.schema.graph import Copy
from tests.errors import raises

MIB = 1 << 20


def test_the_budget_is_shared_and_never_exceeded():
    use = HostUse(100 * MIB)
    first, second = Pool(range, pinned_area, use), Pool(range, pinned_area, use)
    first.take(40 * MIB)
    second.take(50 * MIB)
    small = first.take(MIB)  # an area of what is left
    assert (use.bytes, use.peak) == (100 * MIB, 100 * MIB)
    with raises(HostBudgetExceeded, "20.0 MiB", "100 MiB") as caught:
        second.take(20 * MIB)
    assert "--host-budget" in caught.value.remedy
    assert use.bytes == 100 * MIB
    first.give(small)
    assert first.take(MIB) is small


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_processes_do_not_write_over_each_other(tmp_path):
    way = CpuTransport(tmp_path)
    free, kept = (way.send(torch.full((MIB,), n, dtype=torch.uint8)) for n in (1, 2))
    kept.settle()
    del free  # its place is the next to be used, in each process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        child = os.fork()
    if not child:
        mine = [way.send(torch.full((MIB,), 9, dtype=torch.uint8)) for _ in range(3)]
        os._exit(0 if way.pool.held_bytes == 64 * MIB and len(mine) == 3 else 1)
    mine = way.send(torch.full((MIB,), 3, dtype=torch.uint8))
    mine.settle()
    assert os.waitpid(child, 0)[1] == 0
    assert bool((mine.get() == 3).all()) and bool((kept.get() == 2).all())


def test_copies_of_the_ways_have_a_budget_of_their_own():
    import copy
    import pickle

    transports = OffloadTransports(5 * MIB)
    transports.use.claim(MIB)
    for twin in (copy.deepcopy(transports), pickle.loads(pickle.dumps(transports))):
        assert twin.use.limit == 5 * MIB and twin.use.bytes == 0


LAYER = [4, 4, 1, 1, 4, 14, 14, 14, 4]
"""KiB a token of what a layer saves, as keys and values are narrower than the rest and an MLP is wider."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2048), min_size=2, max_size=12), st.booleans())
def test_memory_for_the_longest_batch_serves_all_others(lengths, bounded):
    """As batches are that are padded to their longest sequence: pinning memory again for each costs seconds a step."""
    made: list[int] = []
    moments = iter(range(100))

    def allocate(nbytes: int) -> range:
        made.append(nbytes)
        return range(sum(made) - nbytes, sum(made))  # no two areas at one address

    def step(length: int) -> None:
        pieces = [pool.take(length * width << 10) for _ in range(4) for width in LAYER]
        taken = sorted((piece.memory.start, piece.memory.stop) for piece in pieces)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        for piece in pieces:
            pool.give(piece)

    use = HostUse()
    pool = Pool(allocate, pinned_area, use, moment=lambda: next(moments))
    step(max(lengths))
    held = pool.held_bytes
    if bounded:
        use.limit = held  # what the longest batch takes, to the byte
    before = len(made)
    for length in lengths:
        step(length)
    assert len(made) - before <= 1 and use.peak <= max(held, held * 9 // 8 + AREA_BYTES)


def test_what_is_cut_again_waits_for_all_that_was_read_from_it():
    pool = Pool(range, pinned_area, moment=lambda: "all that was read")
    first = pool.take(20 * MIB)
    assert first.ready is None
    first.ready = "its own"
    pool.give(first)
    assert pool.take(20 * MIB).ready == "its own"
    pool.give(first)
    second, third = pool.take(12 * MIB), pool.take(8 * MIB)
    assert (second.ready, third.ready) == ("all that was read",) * 2
    assert pool.held_bytes == 20 * MIB


def out(size: int, issued: int, released: int | None, tier: str = "cpu") -> Copy:
    return Copy(direction="out", bytes=size, issued=issued, awaited=None, tier=tier, released=released)


def test_what_is_foretold_by_hand():
    two = [out(10 * MIB, 0, 5), out(10 * MIB, 1, 4)]
    assert host_bytes_of(two, "cuda") == 20 * MIB
    assert host_bytes_of([out(10 * MIB, 0, 2), out(10 * MIB, 3, 4)], "cuda") == 10 * MIB  # one after the other
    assert host_bytes_of([out(100, 0, 2)], "cuda") == AREA_BYTES
    assert host_bytes_of([out(100, 0, 2)], "cuda", limit=3 * MIB) == 3 * MIB
    assert host_bytes_of(two, "cuda", limit=12 * MIB) == 20 * MIB  # over the limit, and it says by how much
    assert host_bytes_of([], "cuda") == 0
    back = Copy(direction="in", bytes=MIB, issued=3, awaited=3)
    assert host_bytes_of([*two, back], "cuda") == 20 * MIB
    disk = [replace(copy, tier="disk") for copy in two]
    assert host_bytes_of(disk, "cuda") == 32 * MIB  # two parts
    assert host_bytes_of(disk, "cpu") == host_bytes_of(two, "cpu") == AREA_BYTES  # one and the same file


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=25),
    st.sampled_from([pinned_area, file_area]),
    st.one_of(st.none(), st.integers(1, 400)),
)
def test_real_pools_do_what_was_foretold(steps, area, limit_mib):
    limit = None if limit_mib is None else limit_mib * MIB
    copies = sorted((out(size, at, at + life) for size, at, life in steps), key=lambda c: c.issued)
    foretold = host_bytes_of(copies, "cpu" if area is file_area else "cuda", limit)
    pool = Pool(range, area, use := HostUse(limit))
    held: list[tuple[int, object]] = []

    def run() -> None:
        for _ in range(3):
            for now in range(20):
                for copy in (c for c in copies if c.issued == now):
                    held.append((copy.released, pool.take(copy.bytes)))
                for end, piece in [h for h in held if h[0] == now]:
                    pool.give(piece)
                    held.remove((end, piece))

    if limit is not None and foretold > limit:
        with pytest.raises(HostBudgetExceeded):
            run()
    else:
        run()
        assert use.peak <= foretold
    assert limit is None or use.peak <= limit
