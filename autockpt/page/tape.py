"""The activation tape: bytes through a step, and what of them was written where, is read where, and lives how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from autockpt.analysis.holdings import COME_AND_GO, GROWING, StepBytes
from autockpt.analysis.kinds import base_name, within
from autockpt.reporting.area import resampled
from autockpt.schema import Graph, Op, OpTimes, Storage
from autockpt.simulator import bytes_timeline, op_seconds

SAMPLES = 360  # moments that can be looked at
LISTED = 900  # storages that are listed one by one; smaller ones are summed up


@dataclass(frozen=True)
class Timeline:
    """One step. Moments are samples: op indices at which the bytes of their stretch are the most.

    ``at`` is when each begins, as a share of the step's ``seconds`` (None: times are not known, shares are of ops);
    ``total``, ``fixed`` and ``growing`` are bytes at each, ``small`` those that come and go and are not listed.
    A row of ``storages``: bytes, op of birth, last op, unit, kind, purpose (indices into ``units``, ``kinds`` and
    ``COME_AND_GO``), who wrote it, who reads it last (indices into ``words``; -1: nobody on record), op of last read.
    """

    name: str
    ops: tuple[int, ...]
    at: tuple[float, ...]
    seconds: float | None
    total: tuple[int, ...]
    fixed: tuple[int, ...]
    growing: tuple[int, ...]
    small: tuple[int, ...]
    storages: tuple[tuple[int, ...], ...]
    units: tuple[str, ...]
    kinds: tuple[str, ...]
    words: tuple[str, ...]
    phases: tuple[tuple[str, float, float], ...]
    peak: int
    average: int
    repeated: int


def tape_of(name: str, graph: Graph, times: OpTimes | None) -> Timeline | None:
    """The tape of a traced step; None for one without ops. Bytes include the context of the device."""
    if not graph.ops:
        return None
    overhead = times.device.overhead_bytes if times is not None else 0
    held = StepBytes(graph, overhead=overhead)
    total = bytes_timeline(graph) + overhead
    begins, seconds = _clock(graph, times)
    n = len(graph.ops)
    growing, moving = held.together(GROWING), held.together(COME_AND_GO)
    ops = resampled(total.tolist(), min(SAMPLES, n))
    listed, rest = _ranked(held)
    small = np.zeros(n, dtype=np.int64)
    for s in rest:
        small[s.birth : n if s.death is None else s.death + 1] += s.bytes
    units, kinds, words = (defaultdict[str, int](count().__next__) for _ in range(3))  # texts by number, each once
    rows = _rows(held, listed, units, kinds, words)
    lasts = np.diff(np.append(begins, 1.0))
    return Timeline(
        name=name,
        ops=tuple(ops),
        at=tuple(round(float(begins[i]), 5) for i in ops),
        seconds=seconds,
        total=tuple(total[ops].tolist()),
        fixed=tuple((total - growing - moving)[ops].tolist()),
        growing=tuple(growing[ops].tolist()),
        small=tuple(small[ops].tolist()),
        storages=rows,
        units=tuple(units),
        kinds=tuple(kinds),
        words=tuple(words),
        phases=tuple(
            (s.phase, round(float(begins[s.start]), 5), round(float(begins[s.stop]) if s.stop < n else 1.0, 5))
            for s in graph.spans()
        ),
        peak=int(total.max()),
        average=int((total * lasts).sum() / max(lasts.sum(), 1e-12)),
        repeated=graph.repeated,
    )


def _clock(graph: Graph, times: OpTimes | None) -> tuple[np.ndarray, float | None]:
    """When each op begins as a share of the step, and the step's seconds; by equal steps where no times are known."""
    n = len(graph.ops)
    step = op_seconds(graph, times) if times is not None and times.seconds else np.zeros(n)
    whole = float(step.sum())
    if whole <= 0:
        return np.arange(n) / n, None
    return np.concatenate([[0.0], np.cumsum(step)[:-1]]) / whole, whole


def _ranked(held: StepBytes) -> tuple[list[Storage], list[Storage]]:
    """What comes and goes: the storages that matter most by bytes and life, in order of birth; and all others."""
    n = len(held.graph.ops)
    moving = [s for s in held.own if held.purposes[s.id] in COME_AND_GO and s.bytes]
    moving.sort(key=lambda s: -s.bytes * (1 + (n if s.death is None else s.death) - s.birth))
    return sorted(moving[:LISTED], key=lambda s: s.birth), moving[LISTED:]


def _rows(
    held: StepBytes, storages: Sequence[Storage], units: dict[str, int], kinds: dict[str, int], words: dict[str, int]
) -> tuple[tuple[int, ...], ...]:
    graph = held.graph
    n = len(graph.ops)
    reads: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        for storage in set(op.inputs):
            reads[storage].append(op.index)
    rows = []
    for s in storages:
        maker = held.makers.get(s.id)
        readers = [i for i in reads[s.id] if i > (maker.index if maker else s.birth)]
        rows.append(
            (
                s.bytes,
                s.birth,
                n - 1 if s.death is None else s.death,
                units[s.unit or ""],
                kinds[held.kind_of(s)],
                COME_AND_GO.index(held.purposes[s.id]),
                words[_said(maker, s.unit)] if maker else -1,
                words[_said(graph.ops[readers[-1]], s.unit)] if readers else -1,
                readers[-1] if readers else -1,
            )
        )
    return tuple(rows)


def _said(op: Op, unit: str | None) -> str:
    """An op for people: where, what, and in which phase; the unit's own name is left out."""
    place = within(op.module, unit)
    name = base_name(op.target)
    return f"{place + ' · ' if place else ''}{name} ({op.phase})"
