"""What seconds rest on, best first: ops timed on the device, a roofline of a named device, common rates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autockpt.errors import RunDirectoryError
from autockpt.hardware.nominal import nominal_op_times
from autockpt.hardware.roofline import roofline_times
from autockpt.history.rundir import RunDirectory
from autockpt.profiling import UniformRuns, cached_op_times
from autockpt.schema import Environment, Graph, OpTimes
from autockpt.schema.explanation import Basis
from autockpt.schema.hardware import Hardware

COVERED = 0.9  # share of the op signatures that timed ones must cover; the rest is estimated from similar ones


@dataclass(frozen=True)
class Times:
    """Op times with what they rest on, and that in words."""

    times: OpTimes
    basis: Basis
    note: str


def of_device(
    environment: Environment, uniform: UniformRuns, heads: Sequence[Graph], workload_key: str, plan: Path | None = None
) -> Times:
    """Op times of the device at hand, from the plan's run directory or the cache; else rates of common hardware."""
    lean = (uniform.get("recompute") or uniform["save"])[1]  # all that is timed; copies are known by their rates
    if (found := _of_run(plan, [lean, *heads])) is not None:
        return Times(found, "measured", f"op times were measured on {found.environment.device.name}, in the plan's run")
    if (cached := cached_op_times(environment, [lean, *heads], workload_key)) is not None:
        return Times(cached, "measured", f"op times were measured on {environment.device.name} by an earlier search")
    return Times(
        nominal_op_times(environment, *(graph for _, graph in uniform.values()), *heads),
        "nominal",
        "seconds are modelled from FLOPs and bytes at nominal rates of common hardware: they rank choices and say "
        "little about this device (a search measures its op times; --hardware NAME models a device that is described)",
    )


def of_hardware(hardware: Hardware, graphs: Sequence[Graph], heads: Sequence[Graph]) -> Times:
    """Op times of a device that is described, not at hand."""
    times = roofline_times(hardware, graphs)
    times = times.completed(roofline_times(hardware, heads))
    return Times(times, "modelled", f"seconds are modelled by a roofline of {hardware.name}, nothing was timed")


def _of_run(plan: Path | None, graphs: Sequence[Graph]) -> OpTimes | None:
    """Op times of the run directory that a plan lies in, where they cover the graphs."""
    if plan is None:
        return None
    folder = plan if plan.is_dir() else plan.resolve().parent
    with suppress(RunDirectoryError, OSError):
        profile = RunDirectory.open(folder).profile()
        if profile is None or "simulated" in profile.op_times.environment.versions:  # nothing was timed
            return None
        if all(_covers(profile.op_times, graph) for graph in graphs):
            return profile.op_times
    return None


def _covers(times: OpTimes, graph: Graph) -> bool:
    """Whether enough of the ops were timed."""
    return sum(text in times.seconds for text in graph.timed) >= COVERED * len(graph.timed)
