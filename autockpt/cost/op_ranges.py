"""Cut a traced cycle into ranges of ops that correspond between the ghost runs of different plans.

Plans change the ops of a step, but every unit still has a forward and a backward: their ranges are what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from autockpt.schema.graph import PHASES, Graph
from autockpt.tracing.kernels.timeline import bytes_timeline, micro_batch_of, phases_of

StepPart = Literal["start", "forward", "after forward", "backward", "after backward", "optimizer"]


class OpRange(NamedTuple):
    """Ops ``first`` to ``end`` (excluded) of one micro-batch: a unit's forward or backward, or the ops that follow it.

    ``unit`` is the index of the unit meant, None before the first one and in the optimizer. ``prefix`` is the number of
    units, in order of execution, that are through their forward and have not begun their backward.
    """

    micro_batch: int
    part: StepPart
    unit: int | None
    prefix: int
    first: int
    end: int

    @property
    def key(self) -> tuple[int, StepPart, int | None]:
        """What identifies the range in every ghost run of the same workload."""
        return self.micro_batch, self.part, self.unit


def op_ranges(graph: Graph, units: Sequence[str]) -> tuple[OpRange, ...]:
    """All ops of a cycle in consecutive ranges, in order and without empty ones.

    ``units`` names the units in order of execution: blocks, perhaps with the output head behind them. A unit's range
    runs from its first op to its last; where two overlap, the earlier one ends as the later begins.
    """
    n = len(graph.ops)
    phase = phases_of(graph)
    place = {name: i for i, name in enumerate(units)}
    unit = np.fromiter(_owners(graph, place), dtype=np.int64, count=n)
    optimizer = phase == PHASES.index("optimizer")
    end = int(np.flatnonzero(optimizer)[0]) if optimizer.any() else n
    batch = micro_batch_of(graph)[:end]
    out: list[OpRange] = []
    for m in range(int(batch[-1]) + 1 if end else 0):
        inside = np.flatnonzero(batch == m)
        out += _micro_batch(m, int(inside[0]), int(inside[-1]) + 1, phase, unit)
    if end < n:
        out.append(OpRange(int(batch[-1]) if end else 0, "optimizer", None, 0, end, n))
    return tuple(out)


def _owners(graph: Graph, place: Mapping[str, int]) -> Iterator[int]:
    """For each op the index of its unit, or -1. Ops outside of blocks belong to the unit that their module lies in."""

    @cache
    def around(module: str) -> int:
        if module in place or not module:
            return place.get(module, -1)
        return around(module.rpartition(".")[0])

    return (around(op.module) if op.unit is None else place.get(op.unit, -1) for op in graph.ops)


def _micro_batch(m: int, first: int, end: int, phase: np.ndarray, unit: np.ndarray) -> list[OpRange]:
    forward, mine = phase[first:end] == PHASES.index("forward"), unit[first:end]
    sides: tuple[tuple[StepPart, np.ndarray], ...] = (("forward", forward), ("backward", ~forward))
    runs: list[tuple[int, int, StepPart, int]] = []  # first op and end of each unit's ops
    for i in np.unique(mine[mine >= 0]):
        for what, wanted in sides:
            at = first + np.flatnonzero(wanted & (mine == i))
            if len(at):
                runs.append((int(at[0]), int(at[-1]) + 1, what, int(i)))
    runs.sort()
    part: StepPart = "start"
    owner, prefix, at = None, 0, first
    out: list[OpRange] = []
    for k, (begin, stop, what, i) in enumerate(runs):
        stop = min(stop, runs[k + 1][0]) if k + 1 < len(runs) else stop
        if at < begin:
            out.append(OpRange(m, part, owner, prefix, at, begin))
        out.append(OpRange(m, what, i, i, begin, stop))
        owner, at = i, stop
        part, prefix = ("after forward", i + 1) if what == "forward" else ("after backward", i)
    if at < end:
        out.append(OpRange(m, part, owner, prefix, at, end))
    return out


def range_peaks(graph: Graph, ranges: Sequence[OpRange]) -> list[int]:
    """The most device bytes at any op of each range."""
    timeline = bytes_timeline(graph)
    return [int(timeline[r.first : r.end].max()) for r in ranges]
