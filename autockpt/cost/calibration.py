"""Cost coefficients that only whole steps show: recomputed ops, copies that no queue hides, and the host's own time.

All depend on what surrounds them (caches, fresh memory, what the copy probe never meets), so they are set by the
uniform plans: where every unit saves, recomputes or offloads, prediction and measurement agree, and what lies between
them is interpolated op by op and byte by byte.

An accelerator waits for its host where ops are small, and for what runs again most of all: that is more than op for op,
as running it again is Python's work. So there the plan that saves tells what the host adds to every op, and the one
that recomputes what it adds to those of second runs, which may take several times what their kernels do.

Choices that keep a part of a unit cost the host time in forward as well: hooks, dispatch modes, bookkeeping. It is what
their uniform plans take beyond the ops of their ghost runs, per unit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from autockpt.cost.step import simulate
from autockpt.schema import Graph, OpTimes

HOST_PRICED = ("selective", "remake")  # kinds of choices that cost the host time besides their ops
ANCHORS = ("save", "recompute", "offload", *HOST_PRICED)  # kinds whose uniform plans are timed whole
RERUN_RANGE, QUEUED_RERUN_RANGE = (0.5, 2.0), (0.5, 8.0)
COPY_RANGE = (0.02, 5.0)  # probes of single copies are off by less than this


def calibrated(times: OpTimes, graphs: Mapping[str, Graph], seconds: Mapping[str, Sequence[float]]) -> OpTimes:
    """``times`` with ``rerun_scale`` and ``choice_seconds`` set by whole steps; on devices without copy queues the copy
    bandwidths as well, on others ``host_seconds``.

    ``graphs`` are the ghost runs of the uniform plans by choice kind, ``seconds`` their interleaved cycle times. What
    lacks times beside those of ``save`` stays as it is.
    """
    if "save" not in seconds:
        return times
    queued = times.environment.device.copy_queues
    if queued:
        kernels = times.model_copy(update={"host_seconds": 0.0})
        # the median, as steps are measured: a host that swings would hide in the quickest round
        idle = statistics.median(seconds["save"]) - simulate(graphs["save"], kernels).step_seconds
        plan = graphs["save"]  # of its ops the host issues all but the optimizer's one by one
        issued = sum(runs for op, runs in zip(plan.ops, plan.runs, strict=True) if op.phase != "optimizer")
        times = kernels.model_copy(update={"host_seconds": max(0.0, idle) / max(1, issued)})
    if "recompute" in seconds:
        plain = simulate(graphs["recompute"], times)
        again = plain.seconds_by_phase["recompute"]
        extra = _target(times, graphs, seconds, "recompute") - (plain.step_seconds - again)
        if again > 0:
            scale = _within(extra / again, QUEUED_RERUN_RANGE if queued else RERUN_RANGE)
            times = times.model_copy(update={"rerun_scale": scale})
    if "offload" in seconds and not queued:
        plain = simulate(graphs["offload"], times)
        extra = _target(times, graphs, seconds, "offload") - (plain.step_seconds - plain.copy_seconds)
        if plain.copy_seconds > 0:
            scale = _within(extra / plain.copy_seconds, COPY_RANGE)
            rates = {name: getattr(times, name) / scale for name in ("copy_out_bandwidth", "copy_in_bandwidth")}
            times = times.model_copy(update=rates)
    host = {}
    for kind in HOST_PRICED:
        if kind in seconds:
            extra = _target(times, graphs, seconds, kind) - simulate(graphs[kind], times).step_seconds
            host[kind] = max(0.0, extra) / max(1, len(graphs[kind].blocks()))
    return times.model_copy(update={"choice_seconds": host})


def _target(times: OpTimes, graphs: Mapping[str, Graph], seconds: Mapping[str, Sequence[float]], kind: str) -> float:
    """Seconds that the simulation of a uniform plan should give: as many times those of ``save`` as were measured."""
    ratio = statistics.median(a / b for a, b in zip(seconds[kind], seconds["save"], strict=True))
    return ratio * simulate(graphs["save"], times).step_seconds


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])
