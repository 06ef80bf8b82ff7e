from __future__ import annotations

import torch

from autockpt.tracing.memory import GhostMemory
from autockpt.tracing.storages import StorageLog


def test_a_storage_lives_as_long_as_anything_that_shares_it() -> None:
    log = StorageLog()
    base = torch.ones(8)
    sid = log.watch(base.untyped_storage(), 0)
    view = base[2:]
    log.clock = 3
    del base
    assert log.death[sid] is None
    log.clock = 5
    del view
    assert log.death[sid] == 4


def test_tensors_saved_for_backward_keep_their_storage() -> None:
    log = StorageLog()
    leaf = torch.ones(4, requires_grad=True)
    hidden = leaf * 2
    sid = log.watch(hidden.untyped_storage(), 0)
    loss = (hidden * hidden).sum()
    log.clock = 1
    del hidden
    assert log.death[sid] is None
    loss.backward()
    assert log.death[sid] == 0


def test_a_storage_is_watched_once_and_its_number_is_not_reused() -> None:
    log = StorageLog()
    first = torch.ones(4)
    assert log.watch(first.untyped_storage(), -1) == log.watch(first.view(2, 2).untyped_storage(), 7) == 0
    assert log.find(first) == 0
    del first
    second = torch.ones(4)
    assert log.find(second) is None
    assert log.watch(second.untyped_storage(), 1) == 1


def test_restart_keeps_the_living_as_resident() -> None:
    log = StorageLog()
    kept, dropped = torch.ones(4), torch.ones(2)
    log.adopt([kept, dropped])
    log.clock = 9
    del dropped
    log.restart()
    assert (log.bytes, log.birth, log.death, log.clock) == ([16], [-1], [None], 0)
    assert log.find(kept) == 0


def test_ghost_storages_give_their_addresses_back() -> None:
    memory = GhostMemory(size=1 << 16)
    log = StorageLog(memory)
    for i in range(100):
        log.clock = i
        storage, sid = log.ghost(40_000, i)
        assert (log.bytes[sid], log.birth[sid]) == (40_000, i)
        del storage
    assert log.death == [i - 1 for i in range(100)]
