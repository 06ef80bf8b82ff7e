"""PyTorch's CUDA caching allocator as pure numbers: what it reserves for a sequence of requests, and when it gives up.

Rules and constants as in torch 2.11 to 2.13: ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``,
``should_split``, ``free_block``, ``release_cached_blocks``) and ``c10/core/AllocatorConfig.h``. One stream, default
settings (no ``expandable_segments``), no CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autockpt.schema.graph import Graph, Storage

MIB = 1 << 20
MIN_BLOCK = 512  # every size is rounded up to a multiple of it
SMALL_SIZE = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests of the large pool below MIN_LARGE
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB  # from MIN_LARGE on segments are the request rounded up to a multiple of it

Event = tuple[int, int | None]


@dataclass(frozen=True)
class AllocatorPeak:
    """What a sequence of requests came to, in bytes.

    ``allocated``: most bytes handed out at once, in whole blocks; ``reserved``: most bytes held of the device. Where
    the sequence could not be served to its end (``out_of_memory``), they are those until then.
    """

    allocated: int
    reserved: int
    out_of_memory: bool = False


class Block:
    """A range of a segment, handed out or cached."""

    __slots__ = ("address", "next", "pool", "prev", "size", "used")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.prev: Block | None = None
        self.next: Block | None = None
        self.used = False


class _Pool:
    """The cached blocks of the small or the large pool, by size then address."""

    __slots__ = ("blocks", "free", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]


def segment_size(size: int) -> int:
    """Bytes taken from the device for a rounded request that no cached block serves."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """Serves requests as PyTorch does. ``limit``: most bytes it may reserve (None: without end).

    ``allocated`` and ``reserved`` are current bytes, ``most_allocated`` and ``most_reserved`` the most there were.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._next_address = 0  # where segments lie is the driver's business; it only breaks ties

    def allocate(self, nbytes: int) -> Block | None:
        """A block for ``nbytes`` > 0; None where the limit leaves no room, with everything given back that can be."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        pool = self._small if size <= SMALL_SIZE else self._large
        block = self._cached(pool, size) or self._grown(pool, size)
        if block is None:
            self.release_cached()
            block = self._grown(pool, size)
        if block is None:
            return None
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small else rest > SMALL_SIZE:
            self._split(block, size)
        block.used = True
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it is joined with free neighbours and cached."""
        block.used = False
        self.allocated -= block.size
        for neighbour in (block.prev, block.next):
            self._merge(block, neighbour)
        block.pool.add(block)

    def release_cached(self) -> None:
        """Give back every segment that nothing is in (``empty_cache``)."""
        for pool in (self._small, self._large):
            for block in list(pool.blocks.values()):
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    # How blocks are found, made and joined.

    def _cached(self, pool: _Pool, size: int) -> Block | None:
        """The smallest cached block that is large enough."""
        free = pool.free
        at = bisect_left(free, (size, 0))
        if at == len(free):
            return None
        return pool.blocks.pop(free.pop(at)[1])

    def _grown(self, pool: _Pool, size: int) -> Block | None:
        """A new segment; None where the limit is in the way."""
        wanted = segment_size(size)
        if self.limit is not None and self.reserved + wanted > self.limit:
            return None
        block = Block(pool, self._next_address, wanted)
        self._next_address += wanted
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.pool, block.address + size, block.size - size)
        rest.prev, rest.next = block, block.next
        if rest.next is not None:
            rest.next.prev = rest
        block.next = rest
        block.size = size
        block.pool.add(rest)

    @staticmethod
    def _merge(block: Block, other: Block | None) -> None:
        """Join a neighbour that is free, too, into the block."""
        if other is None or other.used:
            return
        block.pool.remove(other)
        if other is block.prev:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size


def requests(graph: Graph, cycles: int = 2) -> Iterator[Event]:
    """What a step asks of an allocator, in order: what is resident, then cycle after cycle.

    Optimizer states come in the first cycle's optimizer step, as they do in training: by then segments are divided.
    """
    first_step = next((op.index for op in graph.ops if op.phase == "optimizer"), 0)
    resident = [s for s in graph.storages if s.birth < 0]
    states = [s for s in resident if s.kind == "optimizer"]
    for s in resident:
        if s.kind != "optimizer":
            yield s.id, s.bytes
    count = len(graph.ops)
    born: dict[int, list[Storage]] = {}  # not a list for every op: collecting garbage would look at each
    dying: dict[int, list[int]] = {}
    heirs = _heirs(graph)
    for s in graph.storages:
        if s.birth >= 0:
            born.setdefault(s.birth, []).append(s)
        dies = s.death is not None if s.id in heirs else s.birth >= 0
        if dies:
            dying.setdefault(count if s.death is None else min(s.death + 1, count), []).append(s.id)
    for cycle in range(cycles):
        names = heirs if cycle % 2 else {}
        for index in range(count + 1):
            for key in dying.get(index, ()):
                yield names.get(key, key), None
            if cycle == 0 and index == first_step:
                for s in states:
                    yield s.id, s.bytes
            for s in born.get(index, ()):
                yield names.get(s.id, s.id), s.bytes


def _heirs(graph: Graph) -> dict[int, int]:
    """Storages that a cycle finds and frees, each with the one that it leaves for the next cycle, and the reverse.

    Loops that keep a step's outputs until the next forward have such pairs. They trade names from cycle to cycle.
    """
    found = [s for s in graph.storages if s.birth < 0 and s.death is not None]
    left = [s for s in graph.storages if s.birth >= 0 and s.death is None]
    if [s.bytes for s in found] != [s.bytes for s in left]:
        return {}
    pairs = [(old.id, new.id) for old, new in zip(found, left, strict=True)]
    return dict(pairs) | {new: old for old, new in pairs}


def replay(events: Iterable[Event], *, limit: int | None = None) -> AllocatorPeak:
    """Serve ``events`` in order: (key, bytes) asks for memory, (key, None) gives it back. Requests of 0 bytes are free.

    Ends at the first request that ``limit`` (bytes that may be reserved) leaves no room for.
    """
    allocator = CachingAllocator(limit)
    blocks: dict[int, Block] = {}
    for key, nbytes in events:
        if nbytes is None:
            if (block := blocks.pop(key, None)) is not None:
                allocator.free(block)
        elif nbytes > 0:
            if (block := allocator.allocate(nbytes)) is None:
                return AllocatorPeak(allocator.most_allocated, allocator.most_reserved, out_of_memory=True)
            blocks[key] = block
    return AllocatorPeak(allocator.most_allocated, allocator.most_reserved)
