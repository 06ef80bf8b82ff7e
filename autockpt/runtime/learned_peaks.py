"""What sets of choices take for batches of each size, learned from a device's own counters while training."""

from __future__ import annotations

from itertools import accumulate

import numpy

FORGET = 16  # the part by which a size's largest need goes down to a smaller one that is seen later
APART = 1.25  # sizes that say something about the slope between them
UNSEEN = 0.75
"""A set that was never used is taken to need so much of what a richer one does beyond what a leaner one does."""


class LearnedPeaks:
    """Bytes above what was held when an accumulation began, by set (the richest first) and tokens of the batch."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, tuple[int, float]]] = {}  # by set and class of sizes: largest size, bytes
        self._proven: dict[int, dict[int, tuple[int, int]]] = {}  # likewise: a size, the least room that it ran in

    def learn(self, number: int, tokens: int, took: int, room: int | None) -> None:
        """A batch took so many bytes; ``room`` there was, None where the allocator had to give its cache back."""
        shift = max(0, tokens.bit_length() - 4)  # sizes that count as one: eight to each doubling
        seen, group = self._seen.setdefault(number, {}), -(-tokens >> shift) << shift
        most, before = seen.get(group, (0, 0.0))
        seen[group] = max(most, tokens), max(took, before - (before - took) / FORGET)
        if room is not None:
            proven = self._proven.setdefault(number, {})
            size, had = proven.get(group, (0, room))
            proven[group] = max(size, tokens), max(room, had) if tokens > size else min(room, had)

    def proven(self, number: int, tokens: int, room: int) -> bool:
        """Whether a batch that was at least as large has run by this set in no more room."""
        return any(tokens <= size and had <= room for size, had in self._proven.get(number, {}).values())

    def forget_proofs(self) -> None:
        """Memory lies otherwise by now: what ran in some room may not do so again."""
        self._proven.clear()

    def of(self, number: int, tokens: int) -> float | None:
        """What a batch would take. None: that cannot be told.

        Between sizes that were seen on a straight line, beyond them on one that gets steeper, as scores of attention
        grow with the square. A set that was never used is placed between its neighbours.
        """
        own = self._line(number, tokens)
        above = self._richer(number, tokens)
        below = next((n for m in sorted(self._seen) if m > number and (n := self._line(m, tokens)) is not None), None)
        if own is not None or above is None or below is None:
            return own
        return max(below, UNSEEN * above + (1 - UNSEEN) * below)

    def at_most(self, number: int, tokens: int) -> float | None:
        """The same, where a set that was never used takes as much as the next richer one."""
        own = self._line(number, tokens)
        return self._richer(number, tokens) if own is None else own

    def known(self, number: int) -> bool:
        """Whether a set was ever used."""
        return number in self._seen

    def seen(self, number: int, tokens: int) -> bool:
        """Whether a batch at least as large has run by this set."""
        return any(tokens <= size for size, _ in self._seen.get(number, {}).values())

    def _richer(self, number: int, tokens: int) -> float | None:
        return next((n for m in range(number - 1, -1, -1) if (n := self._line(m, tokens)) is not None), None)

    def _line(self, number: int, tokens: int) -> float | None:
        known = sorted(self._seen.get(number, {}).values())
        if not known:
            return None
        sizes, took = [size for size, _ in known], [*accumulate((took for _, took in known), max)]
        most, last = sizes[-1], took[-1]
        if tokens <= most:
            return float(numpy.interp(tokens, sizes, took))
        apart = [(last - less) / (most - size) for size, less in zip(sizes, took, strict=True) if most >= APART * size]
        return last + max(apart, default=last / most) * (tokens - most) * tokens / most
