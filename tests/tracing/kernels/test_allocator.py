import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.tracing.kernels import allocator
from autockpt.tracing.kernels.allocator import MIB, Block, CachingAllocator, replay

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(1, 64 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB]),
)
# (True, bytes): ask; (False, n): give the n-th oldest block back
STEPS = st.lists(st.tuples(st.booleans(), SIZES), max_size=120)


def test_constants_are_those_of_the_installed_torch() -> None:
    torch = pytest.importorskip("torch")
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists() or "kMinLargeAlloc" not in header.read_text():
        pytest.skip("this torch keeps its constants elsewhere")
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    large = re.search(r"large_segment_size_\{(\d+)\}", header.read_text())
    assert large is not None and int(large[1]) == allocator.LARGE_SEGMENT
    assert {
        k: int(found[k]) for k in ("kMinBlockSize", "kSmallSize", "kSmallBuffer", "kMinLargeAlloc", "kRoundLarge")
    } == {
        "kMinBlockSize": allocator.MIN_BLOCK,
        "kSmallSize": allocator.SMALL_SIZE,
        "kSmallBuffer": allocator.SMALL_SEGMENT,
        "kMinLargeAlloc": allocator.MIN_LARGE,
        "kRoundLarge": allocator.ROUND_LARGE,
    }


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first, then it is no longer below 10 MiB
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # a rest of at most 1 MiB stays with the block
        (11 * MIB, 12 * MIB, 12 * MIB),
        (12 * MIB + 1, 14 * MIB - (2 * MIB - 512), 14 * MIB),
    ],
)
def test_one_request(nbytes: int, allocated: int, reserved: int) -> None:
    peak = replay([(0, nbytes)])
    assert (peak.allocated, peak.reserved) == (allocated, reserved)


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    a = CachingAllocator()
    first, second = a.allocate(40 * MIB), a.allocate(30 * MIB)
    assert first is not None and second is not None
    a.free(first)
    a.free(second)
    third = a.allocate(25 * MIB)
    assert third is not None and third.address == second.address
    assert a.reserved == 70 * MIB


def test_a_hole_that_is_too_small_is_fragmentation() -> None:
    # 30 MiB come free, in one piece of a segment of 60 that is still in use: a request of 40 takes new memory
    events: list[tuple[int, int | None]] = [
        (0, 60 * MIB),
        (0, None),
        (1, 30 * MIB),
        (2, 30 * MIB),
        (2, None),
        (3, 40 * MIB),
    ]
    peak = replay(events)
    assert (peak.allocated, peak.reserved) == (70 * MIB, 100 * MIB)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.one_of(st.none(), st.integers(2 * MIB, 300 * MIB)))
def test_what_is_handed_out_never_overlaps_and_is_counted(steps: list[tuple[bool, int]], limit: int | None) -> None:
    a, live = CachingAllocator(limit), list[Block]()
    for ask, number in steps:
        if ask:
            if (block := a.allocate(number)) is not None:
                live.append(block)
        elif live:
            a.free(live.pop(number % len(live)))
        ranges = sorted((b.address, b.address + b.size) for b in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert a.allocated == sum(b.size for b in live)
        assert a.allocated <= a.reserved
        assert limit is None or a.reserved <= limit
    for block in live:
        a.free(block)
    assert a.allocated == 0
    a.release_cached()
    assert a.reserved == 0
    assert a.most_allocated <= a.most_reserved
