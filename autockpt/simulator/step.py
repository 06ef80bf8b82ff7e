"""One step as a simulation: a compute queue, two copy queues, and the bytes on the device over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autockpt.schema.graph import PHASES, Copy, Graph
from autockpt.simulator.estimate import estimate

REMAINDER = ""  # the key of ops that belong to no unit


@dataclass(frozen=True)
class Simulation:
    """What a step will do, in seconds and bytes.

    ``seconds_by_phase`` adds up to ``step_seconds``. ``seconds_by_unit`` (unit name, "" for the remainder; then
    phase) is compute alone; ``copy_seconds`` is what the compute queue spends waiting for copies besides, and
    ``queue_seconds`` how long the copies of each direction (out, in) take by themselves. ``bytes_timeline`` holds the
    device bytes at each op. ``missing`` names the signatures without a measured time, whose seconds were estimated
    from similar ones and make up ``estimated_seconds``.
    """

    step_seconds: float
    peak_bytes: int
    peak_op: int
    seconds_by_phase: dict[str, float]
    seconds_by_unit: dict[str, dict[str, float]]
    copy_seconds: float
    queue_seconds: dict[str, float]
    bytes_timeline: np.ndarray = field(repr=False)
    missing: tuple[str, ...] = ()
    estimated_seconds: float = 0.0


def simulate(
    graph: Graph,
    op_seconds: Mapping[str, float],
    *,
    bandwidth_out: float = 0.0,
    bandwidth_in: float = 0.0,
    disk_out: float = 0.0,
    disk_in: float = 0.0,
    copy_queues: bool = False,
    optimizer_seconds: float | None = None,
    host_seconds: float = 0.0,
    watch_seconds: float = 0.0,
    rerun_scale: float = 1.0,
) -> Simulation:
    """Step time and bytes of a graph from the seconds of its op signatures.

    ``op_seconds`` by signature text; ``bandwidth_*`` and ``disk_*`` in bytes per second, to host memory and to a file,
    needed where the graph has copies in that direction. With ``copy_queues`` copies run beside compute, else inline
    where they are issued: one queue per direction, and one for both directions of the disk, as one thread serves it.
    ``optimizer_seconds`` replaces the sum over the optimizer's ops. ``host_seconds`` is added to every other op,
    ``watch_seconds`` to those that a dispatch mode watches; ops that run a second time take ``rerun_scale`` times as
    long. Raises ValueError where a needed bandwidth is not positive.
    """
    timeline = bytes_timeline(graph)
    peak_op = int(np.argmax(timeline)) if len(timeline) else 0
    peak = int(timeline[peak_op]) if len(timeline) else graph.resident_bytes
    signature = np.fromiter((op.signature for op in graph.ops), dtype=np.int64, count=len(graph.ops))
    phase = phases_of(graph)
    is_optimizer = phase == PHASES.index("optimizer")
    timed = is_optimizer & (optimizer_seconds is not None)
    table, missing = _table(graph, op_seconds, set(signature[~timed].tolist()))
    duration = table[signature] if len(signature) else np.zeros(0)
    runs = np.array(graph.runs, dtype=np.int64)
    estimated = float((duration * runs)[np.isin(signature, missing) & ~timed].sum())
    duration = np.where(timed, 0.0, duration + host_seconds)
    duration[phase == PHASES.index("recompute")] *= rerun_scale
    if watch_seconds:
        watched = np.fromiter((op.watched for op in graph.ops), dtype=bool, count=len(graph.ops))
        duration = np.where(timed, duration, duration + watch_seconds * watched)
    if optimizer_seconds is not None and is_optimizer.any():
        duration[np.flatnonzero(is_optimizer)[0]] = optimizer_seconds
    speed = {("cpu", "out"): bandwidth_out, ("cpu", "in"): bandwidth_in}
    copies = _alone(graph, speed | {("disk", "out"): disk_out, ("disk", "in"): disk_in})
    waits = _waits(graph.copies, copies, duration) if copy_queues else _at_issue(graph.copies, copies, len(duration))
    total = (duration + waits) * runs
    return Simulation(
        step_seconds=float(total.sum()),
        peak_bytes=peak,
        peak_op=peak_op,
        seconds_by_phase={name: float(total[phase == k].sum()) for k, name in enumerate(PHASES)},
        seconds_by_unit=_by_unit(graph, phase, duration * runs),
        copy_seconds=float((waits * runs).sum()),
        queue_seconds={
            d: float(sum(s for c, s in zip(graph.copies, copies * graph.copied, strict=True) if c.direction == d))
            for d in ("out", "in")
        },
        bytes_timeline=timeline,
        missing=tuple(graph.signatures[i] for i in missing),
        estimated_seconds=estimated,
    )


def bytes_timeline(graph: Graph) -> np.ndarray:
    """Device bytes at each op, int64: ``Graph.timeline`` for graphs of any size."""
    n = len(graph.ops)
    change = np.zeros(n + 1, dtype=np.int64)
    count = len(graph.storages)
    size = np.fromiter((s.bytes for s in graph.storages), dtype=np.int64, count=count)
    birth = np.fromiter((s.birth for s in graph.storages), dtype=np.int64, count=count)
    death = np.fromiter((n if s.death is None else s.death + 1 for s in graph.storages), dtype=np.int64, count=count)
    np.add.at(change, birth[birth >= 0], size[birth >= 0])
    np.subtract.at(change, death[death < n], size[death < n])
    return graph.resident_bytes + np.cumsum(change[:n])


def phases_of(graph: Graph) -> np.ndarray:
    """The phase of each op, int64, as its index in ``PHASES``."""
    number = {name: i for i, name in enumerate(PHASES)}
    return np.array([number[op.phase] for op in graph.ops], dtype=np.int64)


def micro_batch_of(phase: np.ndarray) -> np.ndarray:
    """The micro-batch of each op: a new one begins where forward follows backward."""
    forward = phase == PHASES.index("forward")
    begins = np.zeros(len(phase), dtype=np.int64)
    begins[1:] = forward[1:] & ~forward[:-1]
    return np.cumsum(begins)


def _table(graph: Graph, op_seconds: Mapping[str, float], used: set[int]) -> tuple[np.ndarray, list[int]]:
    """Seconds per signature index, and the indices whose seconds had to be estimated."""
    known = {i: op_seconds[text] for i, text in enumerate(graph.signatures) if text in op_seconds}
    missing = sorted(used - known.keys())
    known.update(estimate(graph, known, set(missing)) if missing else {})
    table = np.zeros(max(1, len(graph.signatures)))
    for i, seconds in known.items():
        table[i] = seconds
    return table, missing


def _alone(graph: Graph, speed: Mapping[tuple[str, str], float]) -> np.ndarray:
    """Seconds of each copy on its own; ``speed`` in bytes per second by tier and direction."""
    for tier, direction in {(c.tier, c.direction) for c in graph.copies}:
        if speed[tier, direction] <= 0:
            name = f"{'disk' if tier == 'disk' else 'bandwidth'}_{direction}"
            raise ValueError(f"the graph copies bytes {direction} ({tier}), so {name} must be positive")
    return np.array([c.bytes / speed[c.tier, c.direction] for c in graph.copies])


def _at_issue(copies: tuple[Copy, ...], seconds: np.ndarray, n: int) -> np.ndarray:
    waits = np.zeros(n)
    for copy, duration in zip(copies, seconds, strict=True):
        waits[min(copy.issued, n - 1)] += duration
    return waits


def _waits(copies: tuple[Copy, ...], seconds: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """Seconds that the compute queue waits before each op; at one op, copies are issued before any is awaited.

    Each direction is one queue, first in, first out; the disk is one for both. A copy the cycle never awaits ends
    beyond it and costs nothing.
    """
    n = len(duration)
    start = np.concatenate([[0.0], np.cumsum(duration)])
    waits = np.zeros(n)
    issue, wait = 0, 1
    events = [(c.issued, issue, k) for k, c in enumerate(copies)]
    events += [(c.awaited, wait, k) for k, c in enumerate(copies) if c.awaited is not None]
    free: dict[str, float] = {}
    end: dict[int, float] = {}
    waited = 0.0
    for op, kind, k in sorted(events):
        now = float(start[min(op, n)]) + waited
        if kind == issue:
            queue = "disk" if copies[k].tier == "disk" else copies[k].direction
            end[k] = free[queue] = max(free.get(queue, 0.0), now) + float(seconds[k])
        elif (late := end[k] - now) > 0:
            waited += late
            waits[min(op, n - 1)] += late
    return waits


def _by_unit(graph: Graph, phase: np.ndarray, seconds: np.ndarray) -> dict[str, dict[str, float]]:
    names = [REMAINDER, *(u.name for u in graph.blocks())]
    place = {name: i for i, name in enumerate(names)}
    unit = np.fromiter((place.get(op.unit or REMAINDER, 0) for op in graph.ops), dtype=np.int64, count=len(graph.ops))
    sums = np.bincount(unit * len(PHASES) + phase, weights=seconds, minlength=len(names) * len(PHASES))
    sums = sums.reshape(len(names), len(PHASES))
    return {name: dict(zip(PHASES, map(float, row), strict=True)) for name, row in zip(names, sums, strict=True)}
