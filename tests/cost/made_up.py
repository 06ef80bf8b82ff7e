"""Op times in numbers of one's own."""

from collections.abc import Mapping

from autockpt.cost.simulation import Simulation, simulate
from autockpt.schema import Graph, OpTimes
from autockpt.schema.graph import PHASES
from tests.samples import environment


def simulated(
    graph: Graph,
    seconds: Mapping[str, float],
    *,
    bandwidth_out: float = 0.0,
    bandwidth_in: float = 0.0,
    disk_out: float = 0.0,
    disk_in: float = 0.0,
    copy_queues: bool = False,
    optimizer_seconds: float | None = None,
    **others: float,
) -> Simulation:
    """A graph on a device of that description; the optimizer takes its ops' seconds where nothing else is said."""
    steps = [graph.signatures[op.signature] for op in graph.ops if op.phase == "optimizer"]
    times = OpTimes(
        environment=environment("cuda", copy_queues=copy_queues),
        seconds=dict(seconds),
        optimizer_seconds=sum(seconds[text] for text in steps) if optimizer_seconds is None else optimizer_seconds,
        copy_out_bandwidth=bandwidth_out,
        copy_in_bandwidth=bandwidth_in,
        disk_out_bandwidth=disk_out,
        disk_in_bandwidth=disk_in,
        **others,
    )
    return simulate(graph, times)


def by_phase(simulation: Simulation) -> dict[str, float]:
    """Seconds of all units and the remainder by phase, without what copies add."""
    units = simulation.seconds_by_unit.values()
    return {phase: sum(seconds[phase] for seconds in units) for phase in PHASES}
