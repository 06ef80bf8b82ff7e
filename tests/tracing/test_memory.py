import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.errors import GhostError
from autockpt.tracing.memory import GhostMemory

TERABYTE = 1 << 40


def tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_a_terabyte_takes_no_memory() -> None:
    memory = GhostMemory()
    size = min(TERABYTE, memory.size // 2)  # other ghost runs of this process may have taken most of what there is
    storage = memory.allocate(size)
    assert storage.nbytes() == size >= 1 << 36
    assert memory.owns(tensor(storage))
    assert not memory.owns(torch.ones(3))


def test_cycles_are_collected_before_memory_is_refused() -> None:
    def in_a_cycle() -> None:
        holder: list[object] = [GhostMemory(size=1 << 46)]
        holder.append(holder)

    try:
        in_a_cycle()
    except GhostError:
        pytest.skip("this system grants no 64 TiB of address space")
    in_a_cycle()  # there is no room for two
    in_a_cycle()


def test_a_write_to_read_only_memory_kills_the_process() -> None:
    memory = GhostMemory()
    ghost = tensor(memory.allocate(64))
    pid = os.fork()
    if pid == 0:
        import faulthandler

        faulthandler.disable()
        ghost[0] = 1
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


def test_full_memory_is_an_error_with_a_remedy() -> None:
    memory = GhostMemory(size=1 << 20)
    memory.allocate(1 << 19)
    with pytest.raises(GhostError) as caught:
        memory.allocate(1 << 20)
    assert caught.value.remedy


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=200))
def test_no_address_is_handed_out_while_it_is_in_use(requests: list[tuple[int, bool]]) -> None:
    memory = GhostMemory(size=1 << 16)
    live: dict[int, int] = {}
    for nbytes, keep in requests:
        try:
            address = memory.allocate(nbytes).data_ptr()
        except GhostError:
            assert sum(live.values()) > (1 << 16) // 8  # only a crowded memory may be full
            continue
        assert memory.base <= address and address + nbytes <= memory.end
        assert all(
            address + nbytes <= start or start + size <= address for start, size in live.items() if nbytes and size
        )
        if keep:
            live[address] = nbytes
        else:
            memory.release(address)
