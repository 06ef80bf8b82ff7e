"""A histogram of the sequence lengths of a training, and of the padded batches that they form."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from autockpt.schema.base import Data
from autockpt.schema.workload import MOST

LEVELS = 48
"""Lengths that are distinguished; others are rounded up to the next one of these, so that none is taken for shorter."""


def _in_order(counts: dict[int, int]) -> dict[int, int]:
    if any(not 0 < length <= MOST or count < 1 for length, count in counts.items()):
        raise ValueError("lengths and counts are whole numbers above 0")
    return dict(sorted(counts.items()))


class Lengths(Data):
    """How many sequences (``of="rows"``) or padded batches (``of="batches"``) there are of each length, in tokens."""

    counts: Annotated[dict[int, int], AfterValidator(_in_order)] = Field(min_length=1)
    of: Literal["rows", "batches"] = "rows"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.counts)

    def __str__(self) -> str:
        """``5,000 rows of 12 to 4,096 tokens, half of them up to 380``."""
        total, seen = sum(self.counts.values()), accumulate(self.counts.values())
        half = next(length for length, below in zip(self.counts, seen, strict=True) if 2 * below >= total)
        least = min(self.counts)
        return f"{total:,} {self.of} of {least:,} to {self.longest:,} tokens, half of them up to {half:,}"

    def cut(self, most: int) -> Lengths:
        """The same where longer sequences are cut off there."""
        counts = Counter[int]()
        for length, count in self.counts.items():
            counts[min(length, most)] += count
        return Lengths(counts=dict(counts), of=self.of)

    def batches(self, rows: int, levels: int = LEVELS) -> dict[int, float]:
        """The share of batches by their padded length, the shortest first; lengths are rounded up to ``levels`` ones.

        Rows are taken to be drawn at random, ``rows`` at a time, and padded to the longest among them: a share F of
        rows up to some length makes F ** ``rows`` of batches. Grouped by length they are shorter: count batches then.
        """
        total, power = sum(self.counts.values()), rows if self.of == "rows" else 1
        upto = [(below / total) ** power for below in accumulate(self.counts.values())]
        shares = {length: now - before for length, now, before in zip(self.counts, upto, [0.0, *upto], strict=False)}
        return _rounded_up(shares, levels)


def _rounded_up(shares: dict[int, float], levels: int) -> dict[int, float]:
    """The same shares on at most so many lengths: where their sum of tokens has grown by a further part."""
    if len(shares) <= levels:
        return shares
    total = sum(length * share for length, share in shares.items())
    found, share, done = dict[int, float](), 0.0, 0.0
    for length, here in shares.items():
        share, done = share + here, done + length * here
        if done >= total * (len(found) + 1) / levels:
            found[length], share = share, 0.0
    last = max(shares)
    found[last] = found.get(last, 0.0) + share
    return found
