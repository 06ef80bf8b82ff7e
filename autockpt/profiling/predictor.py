"""What any plan will do, without a real step: bytes from its ghost run, seconds from op times."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autockpt.schema import Choice, DeviceInfo, Graph, OpTimes, Prediction, plan_hash
from autockpt.simulator import Simulation, simulate

Trace = Callable[[Mapping[str, Choice]], Graph]


def simulation_of(graph: Graph, times: OpTimes) -> Simulation:
    """Bytes over time and step time of a traced cycle on the device that ``times`` are of."""
    return simulate(
        graph,
        times.seconds,
        optimizer_seconds=times.optimizer_seconds,
        host_seconds=times.host_seconds,
        rerun_scale=times.rerun_scale,
        bandwidth_out=times.copy_out_bandwidth,
        bandwidth_in=times.copy_in_bandwidth,
        copy_queues=times.environment.device.copy_queues,
    )


class Predictor:
    """Ghost-runs plans and remembers what came of each."""

    def __init__(self, trace: Trace, op_times: OpTimes) -> None:
        self._trace = trace
        self.op_times = op_times
        self._known: dict[str, Prediction] = {}

    @property
    def device(self) -> DeviceInfo:
        """The device that predictions are for."""
        return self.op_times.environment.device

    def simulation(self, graph: Graph) -> Simulation:
        """Bytes over time and step time of a traced cycle on the device."""
        return simulation_of(graph, self.op_times)

    def graph(self, choices: Mapping[str, Choice]) -> Graph:
        """The ghost run of these choices."""
        return self._trace(choices)

    def predict(self, choices: Mapping[str, Choice]) -> Prediction:
        """Peak bytes (the device's own overhead included) and seconds of one cycle."""
        key = plan_hash(choices)
        if key not in self._known:
            self.learn(choices, self.graph(choices))
        return self._known[key]

    def learn(self, choices: Mapping[str, Choice], graph: Graph) -> Prediction:
        """Keep the prediction of a plan whose ghost run is at hand."""
        simulation = self.simulation(graph)
        prediction = Prediction(
            peak_bytes=graph.peak_bytes + self.device.overhead_bytes, step_seconds=simulation.step_seconds
        )
        self._known[plan_hash(choices)] = prediction
        return prediction
