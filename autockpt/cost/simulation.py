"""Simulate the time of one traced step: queues for compute, copies and collectives.

Op times come from ``OpTimes``. The times of op signatures that were never timed are estimated from those that were.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import numpy as np

from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.graph import PHASES, Graph, Op
from autockpt.schema.profile import OpTimes
from autockpt.tracing.kernels.operators import COLLECTIVES, COPY_IN, COPY_OUT
from autockpt.tracing.kernels.timeline import phases_of

REMAINDER = ""  # the key of ops that belong to no unit


@dataclass(frozen=True)
class Simulation:
    """The predicted seconds of a step.

    ``seconds_by_unit`` (unit name, "" for the remainder; then phase) is compute, with what it waits for collectives;
    ``copy_seconds`` is what the compute queue waits for copies besides. Both add up to ``step_seconds``.
    ``queue_seconds`` is how long the copies of each direction (out, in) take by themselves.
    """

    step_seconds: float
    seconds_by_unit: dict[str, dict[str, float]]
    copy_seconds: float
    queue_seconds: dict[str, float]


def simulate(graph: Graph, times: OpTimes) -> Simulation:
    """Step time of a traced cycle on the device that ``times`` are of.

    With copy queues, copies and collectives run alongside compute: one queue for collectives, one per direction of
    copies, and one for both directions of the disk, as one thread serves it. Without, they run inline where they are
    issued (FSDP2 without streams waits for each collective there). The optimizer's ops take ``times.optimizer_seconds``
    together. Every other op takes its own time, estimated from similar ones where it was not timed, and the host's.
    Raises ValueError where a bandwidth that the graph's copies need is not positive.
    """
    phase = phases_of(graph)
    runs = np.array(graph.runs, dtype=np.int64)
    duration = op_seconds(graph, times)
    optimizer = np.flatnonzero(phase == PHASES.index("optimizer"))
    duration[optimizer] = 0.0
    duration[optimizer[:1]] = times.optimizer_seconds
    copies = _seconds_of_copies(graph, times)
    if times.environment.device.copy_queues:
        duration, waits = _queued(graph, duration, copies)
    else:
        issued = np.array([min(copy.issued, len(duration) - 1) for copy in graph.copies], dtype=np.int64)
        waits = np.bincount(issued, weights=copies, minlength=len(duration))
    return Simulation(
        step_seconds=float(((duration + waits) * runs).sum()),
        seconds_by_unit=_by_unit(graph, phase, duration * runs),
        copy_seconds=float((waits * runs).sum()),
        queue_seconds={
            d: float(sum(s for c, s in zip(graph.copies, copies * graph.copied, strict=True) if c.direction == d))
            for d in ("out", "in")
        },
    )


def op_seconds(graph: Graph, times: OpTimes) -> np.ndarray:
    """Seconds of each op, once, as a simulated step counts them, without copies.

    The optimizer's ops are timed as a whole; here each takes an equal share.
    """
    signature = np.fromiter((op.signature for op in graph.ops), dtype=np.int64, count=len(graph.ops))
    phase = phases_of(graph)
    is_optimizer = phase == PHASES.index("optimizer")
    known = {i: times.seconds[text] for i, text in enumerate(graph.signatures) if text in times.seconds}
    if missing := set(signature[~is_optimizer].tolist()) - known.keys():
        known |= estimated_seconds(graph, known, missing)
    seconds = np.array([known.get(i, 0.0) for i in range(len(graph.signatures))])
    duration = seconds[signature] + times.host_seconds
    on_one_rank = ~np.isin(signature, list(_collectives(graph)))
    duration[(phase == PHASES.index("recompute")) & on_one_rank] *= times.rerun_scale
    duration[is_optimizer] = times.optimizer_seconds / max(1, is_optimizer.sum())
    return duration


def _collectives(graph: Graph) -> set[int]:
    """Signatures of ops that ranks run together."""
    return {i for i, text in enumerate(graph.signatures) if text.startswith(COLLECTIVES)}


def _seconds_of_copies(graph: Graph, times: OpTimes) -> np.ndarray:
    """Seconds of each copy on its own."""
    one_tier = times.environment.device.kind in WITHOUT_STREAMS  # there both are the same file
    tiers = ["disk" if c.tier == "disk" and not one_tier else "copy" for c in graph.copies]
    names = [
        "peer_bandwidth" if copy.direction == "ranks" else f"{tier}_{copy.direction}_bandwidth"
        for copy, tier in zip(graph.copies, tiers, strict=True)
    ]
    for name in set(names):
        if getattr(times, name) <= 0:
            raise ValueError(f"the graph copies bytes, so {name} must be positive")
    least = {"peer_bandwidth": times.peer_seconds}
    pairs = zip(graph.copies, names, strict=True)
    return np.array([least.get(name, 0.0) + copy.bytes / getattr(times, name) for copy, name in pairs])


def _queued(graph: Graph, duration: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each op, and those that it waits for copies, where copies and collectives run alongside compute.

    Each direction of copies is a queue, first in, first out; the disk is one for both. Walks the ops in order with the
    delay so far, as queues make later ops begin later. At one op, copies are issued before any is awaited. A copy that
    the cycle never awaits ends beyond it and costs nothing.
    """
    n, ranks = len(duration), _RankQueue(graph)
    issued, awaited = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for k, copy in enumerate(graph.copies):
        issued[min(copy.issued, n)].append(k)
        if copy.awaited is not None:
            awaited[min(copy.awaited, n)].append(k)
    free, ends = defaultdict[str, float](float), dict[int, float]()  # of each queue, and of each copy
    seconds: list[float] = duration.tolist()
    start: list[float] = [0.0, *np.cumsum(duration).tolist()]  # of each op without any delay
    waits, delay = [0.0] * n, 0.0
    for i in range(n + 1) if ranks.collectives else sorted({*issued, *awaited}):
        for k in issued.get(i, ()):
            copy = graph.copies[k]
            queue = "disk" if copy.tier == "disk" else copy.direction
            ends[k] = free[queue] = max(free[queue], start[i] + delay) + float(copies[k])
        for k in awaited.get(i, ()):
            late = max(0.0, ends[k] - start[i] - delay)
            waits[min(i, n - 1)] += late
            delay += late
        if ranks.collectives and i < n:
            change = ranks.change(graph.ops[i], start[i] + delay, seconds[i])
            seconds[i] += change
            delay += change
    return np.array(seconds), np.array(waits)


class _RankQueue:
    """The queue of collectives. One begins when its input is made and the one before has ended.

    A collective itself takes no time of the compute queue; the ops that use its result wait for its end. FSDP2 sends
    weights, which are there all the time: it gathers some as soon as those before them were copied out of their buffer.
    """

    def __init__(self, graph: Graph) -> None:
        self.collectives = _collectives(graph)
        self._work = graph.work
        self._free = self._copied_out = 0.0
        self._sendable: dict[int, float] = {}  # by storage: since when it can be sent
        self._ends: dict[int, float] = {}  # by storage: when a collective has brought it

    def change(self, op: Op, now: float, seconds: float) -> float:
        """How many seconds longer an op takes that begins ``now``; for a collective minus all its ``seconds``."""
        change, touches = 0.0, self._work[op.signature].kind != "none"
        if op.signature in self.collectives and touches:
            ready = min((self._sendable[sid] for sid in op.inputs if sid in self._sendable), default=now)
            self._free = max(self._free, ready) + seconds
            self._ends |= dict.fromkeys((*op.inputs, *(out.storage for out in op.outputs)), self._free)
            change = -seconds
        elif self._ends and touches:
            change = max(0.0, max((self._ends.get(sid, 0.0) for sid in op.inputs), default=0.0) - now)
        if op.target == COPY_IN:
            self._sendable |= dict.fromkeys((out.storage for out in op.outputs), self._copied_out)
        elif op.target == COPY_OUT:
            self._copied_out = now + (seconds + change)
        return change


def _by_unit(graph: Graph, phase: np.ndarray, seconds: np.ndarray) -> dict[str, dict[str, float]]:
    names = [REMAINDER, *(u.name for u in graph.blocks())]
    place = {name: i for i, name in enumerate(names)}
    unit = np.fromiter((place.get(op.unit or REMAINDER, 0) for op in graph.ops), dtype=np.int64, count=len(graph.ops))
    sums = np.bincount(unit * len(PHASES) + phase, weights=seconds, minlength=len(names) * len(PHASES))
    sums = sums.reshape(len(names), len(PHASES))
    return {name: dict(zip(PHASES, map(float, row), strict=True)) for name, row in zip(names, sums, strict=True)}


def estimated_seconds(graph: Graph, known: dict[int, float], missing: set[int]) -> dict[int, float]:
    """Seconds for each missing signature index, from the seconds of the ``known`` ones of the same graph.

    Timed signatures of the same op are scaled by FLOPs (where both have them) or by bytes moved. Without any, the
    median rate of all timed ops that do arithmetic, or that only move bytes, is used. Zero where nothing was timed, and
    for ops that touch no bytes, such as the views around offloaded tensors.
    """
    out: dict[int, float] = {}
    for i in missing:
        mine = graph.work[i]
        if mine.kind == "none":
            out[i] = 0.0
            continue
        by = operator.attrgetter("flops" if mine.flops else "bytes")
        alike = {k: work for k in known if bool((work := graph.work[k]).flops) == bool(mine.flops)}
        evidence = {k: work for k, work in alike.items() if work.name == mine.name} or alike
        rates = [known[k] / by(work) for k, work in evidence.items() if by(work) > 0]
        if rates and by(mine) > 0:
            out[i] = median(rates) * by(mine)
        else:
            out[i] = median(known[k] for k in evidence) if evidence else 0.0
    return out
