"""PyTorch's CUDA caching allocator as pure numbers: what it reserves for a sequence of requests, and when it gives up.

Rules and constants as in torch 2.11 to 2.13: ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``,
``should_split``, ``free_block``, ``release_cached_blocks``) and ``c10/core/AllocatorConfig.h``. One stream, default
settings (no ``expandable_segments``), no CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
MIN_BLOCK = 512  # every size is rounded up to a multiple of it
SMALL_SIZE = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests of the large pool below MIN_LARGE
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB  # from MIN_LARGE on segments are the request rounded up to a multiple of it

Event = tuple[int, int | None]


class OutOfReserve(Exception):
    """The limit leaves no room for a request of ``nbytes``, even with everything given back that can be."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"no room for {nbytes} bytes")
        self.nbytes = nbytes


@dataclass(frozen=True)
class AllocatorPeak:
    """What a sequence of requests came to, in bytes.

    ``requested``: most bytes asked for at once; ``allocated``: the same as the allocator counts them, in whole blocks;
    ``reserved``: most bytes held of the device. ``retries`` counts how often cached segments were given back for room;
    ``failed_at`` is the event at which memory ran out (None: it did not), and the peaks are those until then.
    """

    requested: int
    allocated: int
    reserved: int
    retries: int = 0
    failed_at: int | None = None

    @property
    def fragmentation(self) -> int:
        """Reserved bytes beyond what was ever allocated."""
        return self.reserved - self.allocated

    @property
    def out_of_memory(self) -> bool:
        """Whether the sequence could not be served to its end."""
        return self.failed_at is not None


class Block:
    """A range of a segment, handed out or cached."""

    __slots__ = ("address", "next", "pool", "prev", "requested", "size", "used")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.prev: Block | None = None
        self.next: Block | None = None
        self.used = False
        self.requested = 0


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

    ``requested``, ``allocated`` and ``reserved`` are current bytes, ``peak()`` tells the most there were of each.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.requested = self.allocated = self.reserved = self.retries = 0
        self._most = [0, 0, 0]
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._next_address = 0  # where segments lie is the driver's business; it only breaks ties

    def allocate(self, nbytes: int) -> Block:
        """A block for ``nbytes`` > 0. Raises OutOfReserve where the limit leaves no room."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        pool = self._small if size <= SMALL_SIZE else self._large
        block = self._cached(pool, size) or self._grown(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._grown(pool, size)
        if block is None:
            raise OutOfReserve(nbytes)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small else rest > SMALL_SIZE:
            self._split(block, size)
        block.used = True
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        most = self._most
        if self.allocated > most[1]:
            most[1] = self.allocated
        if self.requested > most[0]:
            most[0] = self.requested
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it is joined with free neighbours and cached."""
        if not block.used:
            raise ValueError("the block is not handed out")
        block.used = False
        self.requested -= block.requested
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

    def peak(self, failed_at: int | None = None) -> AllocatorPeak:
        """The most there was so far."""
        requested, allocated, reserved = self._most
        return AllocatorPeak(requested, allocated, reserved, self.retries, failed_at)

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
        self._most[2] = max(self._most[2], self.reserved)
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


def replay(events: Iterable[Event], *, limit: int | None = None) -> AllocatorPeak:
    """Serve ``events`` in order: (key, bytes) asks for memory, (key, None) gives it back. Requests of 0 bytes are free.

    Ends at the first request that ``limit`` (bytes that may be reserved) leaves no room for.
    """
    allocator = CachingAllocator(limit)
    blocks: dict[int, Block] = {}
    for index, (key, nbytes) in enumerate(events):
        if nbytes is None:
            block = blocks.pop(key, None)
            if block is not None:
                allocator.free(block)
        elif nbytes > 0:
            if key in blocks:
                raise ValueError(f"storage {key} is allocated twice")
            try:
                blocks[key] = allocator.allocate(nbytes)
            except OutOfReserve:
                return allocator.peak(index)
    return allocator.peak()
