"""What any plan will do, without a real step: bytes from its ghost run, seconds from op times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from autockpt.devices import host_bytes_of
from autockpt.schema import Choice, DeviceInfo, Graph, OpTimes, Prediction, plan_hash
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.simulator import Simulation, simulate

Trace = Callable[[Mapping[str, Choice]], Graph]


class MemoryModel(Protocol):
    """What ghost runs need of a device, in bytes, its own overhead included."""

    def __call__(self, graph: Graph) -> int:
        """The need of a graph."""
        ...

    def least(self, graph: Graph, promised: int) -> int:
        """The part of what ``__call__`` promised that other plans cannot use."""
        ...

    def within(self, budget: int) -> MemoryModel:
        """The same where the device's allocator is kept to ``budget`` bytes."""
        ...


def simulation_of(graph: Graph, times: OpTimes) -> Simulation:
    """Bytes over time and step time of a traced cycle on the device that ``times`` are of."""
    device = times.environment.device
    out, back = times.copy_out_bandwidth, times.copy_in_bandwidth
    one_tier = device.kind in WITHOUT_STREAMS  # there both are the same file
    return simulate(
        graph,
        times.seconds,
        optimizer_seconds=times.optimizer_seconds,
        host_seconds=times.host_seconds,
        watch_seconds=times.watch_seconds,
        rerun_scale=times.rerun_scale,
        bandwidth_out=out,
        bandwidth_in=back,
        disk_out=out if one_tier else times.disk_out_bandwidth,
        disk_in=back if one_tier else times.disk_in_bandwidth,
        copy_queues=device.copy_queues,
    )


class Predictor:
    """Ghost-runs plans and remembers what came of each. ``host_budget`` in bytes bounds what offloading may claim.

    ``needs`` says what a ghost run takes of the device (default: what tensors hold, and the device's overhead).
    """

    def __init__(
        self, trace: Trace, op_times: OpTimes, host_budget: int | None = None, needs: MemoryModel | None = None
    ) -> None:
        self._trace, self.needs = trace, needs
        self.op_times = op_times
        self.host_budget = host_budget
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

    def keep_within(self, budget: int) -> None:
        """From now on predict for a device whose allocator is kept to ``budget`` bytes; what fits it stands."""
        if self.needs is not None:
            self.needs = self.needs.within(budget)
            self._known = {key: said for key, said in self._known.items() if said.peak_bytes <= budget}

    def least_bytes(self, graph: Graph, promised: int) -> int:
        """Bytes of a prediction by which plans near it are judged, without the device's own overhead."""
        needed = self.needs.least(graph, promised) if self.needs else promised
        return needed - self.device.overhead_bytes

    def known(self, choices: Mapping[str, Choice]) -> Prediction | None:
        """What came of these choices, where they were ghost-run before."""
        return self._known.get(plan_hash(choices))

    def over_host(self, choices: Mapping[str, Choice]) -> int:
        """Bytes by which a plan is over the host budget; 0 where it is not."""
        return 0 if self.host_budget is None else max(0, self.predict(choices).host_bytes - self.host_budget)

    def learn(self, choices: Mapping[str, Choice], graph: Graph) -> Prediction:
        """Keep the prediction of a plan whose ghost run is at hand."""
        simulation = self.simulation(graph)
        prediction = Prediction(
            peak_bytes=self.needs(graph) if self.needs else graph.peak_bytes + self.device.overhead_bytes,
            step_seconds=simulation.step_seconds,
            host_bytes=host_bytes_of(graph.copies, self.device.kind, self.host_budget),
        )
        self._known[plan_hash(choices)] = prediction
        return prediction
