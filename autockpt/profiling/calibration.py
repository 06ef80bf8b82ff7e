"""Two prices that only whole steps tell: ops that run a second time, and copies that no queue hides.

Both depend on what surrounds them (caches, fresh memory, what the copy probe never meets), so they are set by the
uniform plans: where every unit recomputes, or offloads, prediction and measurement agree, and what lies between them is
interpolated op by op and byte by byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from autockpt.schema import Graph, OpTimes
from autockpt.simulator import simulate

ANCHORS = ("save", "recompute", "offload")  # kinds whose uniform plans are timed whole
RERUN_RANGE = (0.5, 2.0)
COPY_RANGE = (0.02, 5.0)  # probes of single copies are off by less than this


def calibrated(times: OpTimes, graphs: Mapping[str, Graph], seconds: Mapping[str, Sequence[float]]) -> OpTimes:
    """``times`` with ``rerun_scale`` and, on devices without copy queues, the copy bandwidths set by whole steps.

    ``graphs`` are the ghost runs of the uniform plans by choice kind, ``seconds`` their interleaved cycle times. What
    lacks times beside those of ``save`` stays as it is.
    """
    if "save" not in seconds:
        return times
    if "recompute" in seconds:
        plain = simulate(graphs["recompute"], times)
        again = plain.seconds_by_phase["recompute"]
        extra = _target(times, graphs, seconds, "recompute") - (plain.step_seconds - again)
        if again > 0:
            times = times.model_copy(update={"rerun_scale": _within(extra / again, RERUN_RANGE)})
    if "offload" in seconds and not times.environment.device.copy_queues:
        plain = simulate(graphs["offload"], times)
        extra = _target(times, graphs, seconds, "offload") - (plain.step_seconds - plain.copy_seconds)
        if plain.copy_seconds > 0:
            scale = _within(extra / plain.copy_seconds, COPY_RANGE)
            rates = {name: getattr(times, name) / scale for name in ("copy_out_bandwidth", "copy_in_bandwidth")}
            times = times.model_copy(update=rates)
    return times


def _target(times: OpTimes, graphs: Mapping[str, Graph], seconds: Mapping[str, Sequence[float]], kind: str) -> float:
    """Seconds that the simulation of a uniform plan should give: as many times those of ``save`` as were measured."""
    ratio = statistics.median(a / b for a, b in zip(seconds[kind], seconds["save"], strict=True))
    return ratio * simulate(graphs["save"], times).step_seconds


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])
