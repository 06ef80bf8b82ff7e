"""One step as a simulation: queues for compute, copies and collectives, and the bytes on the device over time.

Seconds for op signatures that were never timed, from those that were.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import numpy as np

from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.graph import PHASES, Graph
from autockpt.schema.profile import OpTimes
from autockpt.tracing.kernels.operators import COLLECTIVES, COPY_IN, COPY_OUT
from autockpt.tracing.kernels.timeline import phases_of

REMAINDER = ""  # the key of ops that belong to no unit


@dataclass(frozen=True)
class Simulation:
    """What a step will take, in seconds.

    ``seconds_by_phase`` adds up to ``step_seconds``. ``seconds_by_unit`` (unit name, "" for the remainder; then
    phase) is compute, with what it waits for collectives; ``copy_seconds`` is what the compute queue spends waiting for
    copies besides, and ``queue_seconds`` how long the copies of each direction (out, in) take by themselves.
    """

    step_seconds: float
    seconds_by_phase: dict[str, float]
    seconds_by_unit: dict[str, dict[str, float]]
    copy_seconds: float
    queue_seconds: dict[str, float]


def simulate(graph: Graph, times: OpTimes) -> Simulation:
    """Step time of a traced cycle on the device that ``times`` are of.

    With copy queues copies and collectives run beside compute, else inline where they are issued: one queue for
    collectives, one per direction of copies, and one for both directions of the disk, as one thread serves it. (Without
    streams FSDP2 waits for each collective where it is issued.) The optimizer's ops
    take ``times.optimizer_seconds`` together, every other one its own (estimated from similar ones where nobody timed
    it) and the host's seconds. Raises ValueError where a bandwidth that the graph's copies need is not positive.
    """
    phase = phases_of(graph)
    runs = np.array(graph.runs, dtype=np.int64)
    duration = op_seconds(graph, times)
    optimizer = np.flatnonzero(phase == PHASES.index("optimizer"))
    duration[optimizer] = 0.0
    duration[optimizer[:1]] = times.optimizer_seconds
    copies = _alone(graph, times)
    if times.environment.device.copy_queues:
        duration, waits = _queued(graph, duration, copies)
    else:
        issued = np.array([min(copy.issued, len(duration) - 1) for copy in graph.copies], dtype=np.int64)
        waits = np.bincount(issued, weights=copies, minlength=len(duration))
    total = (duration + waits) * runs
    return Simulation(
        step_seconds=float(total.sum()),
        seconds_by_phase={name: float(total[phase == k].sum()) for k, name in enumerate(PHASES)},
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
        known |= estimate(graph, known, missing)
    seconds = np.array([known.get(i, 0.0) for i in range(len(graph.signatures))])
    duration = seconds[signature] + times.host_seconds
    alone = ~np.isin(signature, list(_collectives(graph)))
    duration[(phase == PHASES.index("recompute")) & alone] *= times.rerun_scale
    duration[is_optimizer] = times.optimizer_seconds / max(1, is_optimizer.sum())
    return duration


def _collectives(graph: Graph) -> set[int]:
    """Signatures of ops that ranks run together."""
    return {i for i, text in enumerate(graph.signatures) if text.startswith(COLLECTIVES)}


def _alone(graph: Graph, times: OpTimes) -> np.ndarray:
    """Seconds of each copy on its own."""
    one_tier = times.environment.device.kind in WITHOUT_STREAMS  # there both are the same file
    ways = ["disk" if c.tier == "disk" and not one_tier else "copy" for c in graph.copies]
    names = [
        "peer_bandwidth" if copy.direction == "ranks" else f"{way}_{copy.direction}_bandwidth"
        for copy, way in zip(graph.copies, ways, strict=True)
    ]
    for name in set(names):
        if getattr(times, name) <= 0:
            raise ValueError(f"the graph copies bytes, so {name} must be positive")
    least = {"peer_bandwidth": times.peer_seconds}
    pairs = zip(graph.copies, names, strict=True)
    return np.array([least.get(name, 0.0) + copy.bytes / getattr(times, name) for copy, name in pairs])


def _queued(graph: Graph, duration: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each op, and those that it waits for copies, where collectives and ``copies`` are beside compute.

    Each direction of copies is one queue, first in, first out; the disk is one for both. At one op, copies are issued
    before any is awaited. One that the cycle never awaits ends beyond it and costs nothing.

    Collectives are a queue as well: their own seconds are none, those who wait take longer. One begins when what it
    sends is made and the one before has ended; whoever touches what it brings waits for its end. FSDP2 sends weights,
    which are there all the time: it gathers some as soon as those before them have been copied out of their buffer.
    """
    together = _collectives(graph)
    n, moved = len(duration), list(zip(graph.copies, copies.tolist(), strict=True))
    if not together and not moved:
        return duration, np.zeros(n)
    issued, awaited = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for k, (copy, _) in enumerate(moved):
        issued[min(copy.issued, n)].append(k)
        if copy.awaited is not None:
            awaited[min(copy.awaited, n)].append(k)
    seconds: list[float] = duration.tolist()
    start: list[float] = [0.0, *np.cumsum(duration).tolist()]  # of each op, had none to wait
    waits, behind = [0.0] * n, 0.0
    free: dict[str, float] = {}  # by queue
    end: dict[int, float] = {}  # by copy
    link = copied = 0.0
    early: dict[int, float] = {}  # by storage: when it can be sent
    ends: dict[int, float] = {}  # by storage: when a collective has brought it
    for i in range(n + 1) if together else sorted({*issued, *awaited}):
        for k in issued.get(i, ()):
            copy, took = moved[k]
            queue = "disk" if copy.tier == "disk" else copy.direction
            end[k] = free[queue] = max(free.get(queue, 0.0), start[i] + behind) + took
        for k in awaited.get(i, ()):
            late = max(0.0, end[k] - start[i] - behind)
            waits[min(i, n - 1)] += late
            behind += late
        if i == n or not together:
            continue
        op, now, change = graph.ops[i], start[i] + behind, 0.0
        touches = graph.work[op.signature].kind != "none"
        if op.signature in together and touches:
            link = max(link, min((early[sid] for sid in op.inputs if sid in early), default=now)) + seconds[i]
            ends |= dict.fromkeys((*op.inputs, *(out.storage for out in op.outputs)), link)
            change = -seconds[i]
        elif ends and touches:
            change = max(0.0, max((ends.get(sid, 0.0) for sid in op.inputs), default=0.0) - now)
        seconds[i] += change
        behind += change
        if op.target == COPY_IN:
            early |= dict.fromkeys((out.storage for out in op.outputs), copied)
        elif op.target == COPY_OUT:
            copied = now + seconds[i]
    return np.array(seconds), np.array(waits)


def _by_unit(graph: Graph, phase: np.ndarray, seconds: np.ndarray) -> dict[str, dict[str, float]]:
    names = [REMAINDER, *(u.name for u in graph.blocks())]
    place = {name: i for i, name in enumerate(names)}
    unit = np.fromiter((place.get(op.unit or REMAINDER, 0) for op in graph.ops), dtype=np.int64, count=len(graph.ops))
    sums = np.bincount(unit * len(PHASES) + phase, weights=seconds, minlength=len(names) * len(PHASES))
    sums = sums.reshape(len(names), len(PHASES))
    return {name: dict(zip(PHASES, map(float, row), strict=True)) for name, row in zip(names, sums, strict=True)}


def estimate(graph: Graph, known: dict[int, float], missing: set[int]) -> dict[int, float]:
    """Seconds for each missing signature index, from the seconds of the ``known`` ones of the same graph.

    The nearest evidence wins: timed signatures of the same op, scaled by FLOPs (where both have them) or by bytes
    moved; else the median rate of all timed ops that do arithmetic, or that only move bytes. Zero where nothing was
    timed, and for ops that touch no bytes: those around what is offloaded are in no step that recomputes.
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
