"""The choice ``segment`` (``checkpoint_sequential``): several units that are recomputed together.

The cost of a unit in a segment depends on its neighbours, so segments are on no menu. Instead the first units of a
model are put into segments, each with a single option of known cost, and the rest is solved as usual. They are the
first ones because a segment's recomputed tensors are alive in backward when later units have freed theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import NamedTuple

from autockpt.schema.choices import RECOMPUTE, SAVE, Choice, Segment
from autockpt.solvers.exact import exact
from autockpt.solvers.problem import Option, Problem, UnitOptions, option_of
from autockpt.solvers.refine import Checked, Checker, Refined, refine, solved

SIZES = (2, 3, 4, 6, 8, 12)
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the units that may be in segments
WORTH = 0.002  # share of the step by which a plan with segments has to be faster, as others are easier to read
CALLS = 4  # checks of plans with segments


class Member(NamedTuple):
    """What changes for a unit if the next one is in the same segment.

    It is recomputed to its end, ``seconds`` longer than with recompute, which stops early. ``passed`` are the bytes of
    its output for the next unit, which are not kept.
    """

    seconds: float
    passed: int


Segments = Mapping[str, Member]
"""The units that may form segments, in order from the first, and what they cost there; empty where none may."""


def segmented(problem: Problem, segments: Segments) -> Iterator[Problem]:
    """The problem with some of its first units in segments, in several sizes and numbers."""
    able = 0
    for unit, name in zip(problem.units, segments, strict=False):
        if unit.name != name or RECOMPUTE not in [option.choice for option in unit.options]:
            break
        able += 1
    sizes: set[int] = {s for s in SIZES if s <= able} | ({math.isqrt(able)} if able > 3 else set())
    for size in sorted(sizes):
        for count in dict.fromkeys(size * (int(share * able) // size) for share in SHARES):
            if count:
                yield _fixed(problem, segments, size, count)


def _fixed(problem: Problem, segments: Segments, size: int, count: int) -> Problem:
    """The first ``count`` units in segments of ``size``; what passes inside of them is not in the points' base."""
    units = list(problem.units)
    gone = [0]  # bytes that the first so many units do not pass on
    for first in range(0, count, size):
        again = 0  # bytes of the segment's earlier units, all recomputed before the backward of its last one
        for place in range(first, first + size):
            unit, (seconds, passed) = units[place], segments[units[place].name]
            alone, saved = option_of(unit, RECOMPUTE), option_of(unit, SAVE)
            last = place == first + size - 1
            option = Option(
                choice=Segment(size=size),
                seconds=alone.seconds if last else alone.seconds + seconds,
                kept=alone.kept,
                forward=alone.forward,
                backward=again + (alone.backward if last else saved.backward),
            )
            units[place] = UnitOptions(name=unit.name, options=(option,))
            again += saved.kept + passed
            gone.append(gone[-1] + (0 if last else passed))
    points = tuple(p.model_copy(update={"base": p.base - gone[min(p.prefix, count)]}) for p in problem.points)
    return problem.model_copy(update={"units": tuple(units), "points": points})


def refine_segmented(
    problem: Problem,
    check: Checker,
    segments: Segments,
    *,
    max_calls: int,
    remembered: MutableMapping[tuple[Choice, ...], Checked] | None = None,
) -> Refined:
    """``refine``, and where the numbers say that segments are worth it, again with these: the better of the two.

    That is asked of the numbers alone, as the check has corrected them, in some milliseconds; only then up to
    ``CALLS`` more plans go to it.
    """
    asking = partial(refine, check=check, remembered=remembered)
    plain = asking(problem, max_calls=max_calls)
    offsets, found = plain.offsets, list(segmented(problem, segments))
    if not plain.feasible:  # the leanest with segments may fit where no other plan does
        leanest = min(found, key=lambda asked: exact(asked.model_copy(update={"budget_bytes": 0})).peak, default=None)
        if leanest is None:
            return plain
        lean = asking(leanest, max_calls=max_calls)
        plain = lean if lean.feasible else plain
    worth = WORTH * abs(problem.base_seconds)
    ceiling = least = plain.assignment.seconds - worth if plain.feasible else math.inf
    best = None
    for asked in found:
        if sum(unit.options[0].seconds for unit in asked.units if len(unit.options) == 1) < ceiling:
            answer = solved(asked, offsets)
            if answer.feasible and answer.seconds < ceiling:
                best, ceiling = asked, answer.seconds
    if best is None:
        return plain
    again = asking(best, max_calls=min(CALLS, max_calls), offsets=offsets)
    return again if again.feasible and again.assignment.seconds < least else plain
