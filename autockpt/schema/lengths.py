"""How long the sequences are that a training will see: a histogram, and what padding makes of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data
from autockpt.schema.files import read_regular, reason
from autockpt.schema.workload import MOST

LEVELS = 48
"""Lengths that are told apart; others are rounded up to the next one of these, so that none is taken for shorter."""
_LINE = re.compile(r"([0-9]{1,9})(?:[\s:,;]+([0-9]{1,12}))?")
_BYTES = 200_000_000


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


def parse_lengths(text: str) -> Lengths:
    """From ``512:100,1024:40,4096:3``, or a file with a length, or a length and how many there are, on each line.

    Raises UsageError for anything else, naming the line.
    """
    if re.fullmatch(r"[0-9]+:[0-9]+(?:[,;\s]+[0-9]+:[0-9]+)*[,;\s]*", text):
        return _counted("--lengths", re.split(r"[,;\s]+", text.strip(" ,;")))
    try:
        lines = read_regular(Path(text), _BYTES, links=True).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{text} is no text", remedy=_HOW) from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"the lengths in {text} cannot be read: {why}", remedy=_HOW) from None
    return _counted(text, lines)


_HOW = "Give a file with a length, or a length and a count, on each line; or 512:100,1024:40,4096:3."


def _counted(name: str, lines: Iterable[str]) -> Lengths:
    counts = Counter[int]()
    for number, line in enumerate(lines, 1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = re.fullmatch(_LINE, said)
        length, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not 0 < length <= MOST or count < 1:
            raise UsageError(f"{name}:{number}: {said[:40]!r} is no length with a count", remedy=_HOW)
        counts[length] += count
    if not counts:
        raise UsageError(f"{name} holds no lengths", remedy=_HOW)
    return Lengths(counts=dict(counts))


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
