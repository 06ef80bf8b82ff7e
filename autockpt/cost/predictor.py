"""Predict the peak and step time of any plan without a real step: bytes from its ghost run, seconds from op times.

``MemoryModel`` turns the bytes of tensors into the bytes that a device's allocator reserves for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from autockpt.checkpointing.fingerprint import TABLE_BYTES
from autockpt.cost.simulation import Simulation, simulate
from autockpt.devices import host_bytes_of
from autockpt.interpreter import patched
from autockpt.schema import Choice, DeviceInfo, Environment, Graph, Hardware, OpTimes, Prediction, plan_hash
from autockpt.schema.device import ALLOCATOR_SETTINGS, WITHOUT_STREAMS
from autockpt.schema.request import Listener, Silence
from autockpt.schema.trial import GhostAnswer
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.allocator import Event, replay, requests
from autockpt.tracing.kernels.cuda_memory import with_resident

REMEMBERED_OPS = 100_000  # of the graphs that are kept: about 0.3 GB


class Predictor:
    """Ghost-runs plans and remembers their predictions. ``host_budget`` in bytes bounds what offloading may claim.

    ``memory`` gives the device memory of a ghost run (default: its tensors and the device's overhead). Without a
    ``tracer`` it knows only the ghost runs that it is given.
    """

    def __init__(
        self,
        tracer: Tracer | None,
        times: OpTimes,
        host_budget: int | None = None,
        memory: MemoryModel | None = None,
    ) -> None:
        self._tracer, self.op_times = tracer, times
        self.memory = memory or MemoryModel(self.device.capacity_bytes, self.device.overhead_bytes, caches=False)
        self.host_budget = host_budget
        self._known: dict[str, GhostAnswer] = {}
        self._graphs: dict[str, Graph] = {}  # of the last ghost runs
        self._listener: Listener = Silence()

    @property
    def device(self) -> DeviceInfo:
        """The device that predictions are for."""
        return self.op_times.device

    def simulation(self, graph: Graph) -> Simulation:
        """The simulated step of a traced cycle on the device."""
        return simulate(graph, self.op_times)

    def graph(self, choices: Mapping[str, Choice]) -> Graph:
        """The ghost run of these choices; the last few are remembered."""
        assert self._tracer is not None
        key = plan_hash(choices)
        try:
            graph = self._graphs.pop(key, None) or self._tracer.trace(choices)
        finally:
            self._listener.advance()
        self._graphs[key] = graph
        while len(self._graphs) > 1 and sum(len(graph.ops) for graph in self._graphs.values()) > REMEMBERED_OPS:
            self._graphs.pop(next(iter(self._graphs)))
        return graph

    def watched(self, listener: Listener) -> AbstractContextManager[None]:
        """Report each ghost run within the block to ``listener``, as a step of its stage."""
        return patched(self, "_listener", listener)

    def ahead(self, plans: Iterable[Mapping[str, Choice]]) -> None:
        """Begin with the ghost runs of plans that will be needed."""
        if self._tracer is not None:
            new = [plan for plan in plans if self.known(plan) is None and plan_hash(plan) not in self._graphs]
            self._tracer.ahead(new)

    def predict(self, choices: Mapping[str, Choice]) -> Prediction:
        """Peak bytes (the device's own overhead included) and seconds of one cycle."""
        return self.known(choices) or self.learn(choices, self.graph(choices))

    def keep_within(self, budget_bytes: int) -> None:
        """From now on predict with an allocator limited to ``budget_bytes``; predictions that fit it stay valid."""
        if self.memory.caches:
            self.memory = self.memory.within(budget_bytes)
            self._known = {k: run for k, run in self._known.items() if run.predicted.peak_bytes <= budget_bytes}

    def known(self, choices: Mapping[str, Choice]) -> Prediction | None:
        """The prediction of these choices, if they were ghost-run before."""
        known = self._known.get(plan_hash(choices))
        return known.predicted if known is not None else None

    @property
    def ghost_runs(self) -> tuple[GhostAnswer, ...]:
        """Every plan with a known prediction, and that prediction."""
        return tuple(self._known.values())

    def over_host(self, choices: Mapping[str, Choice]) -> int:
        """Bytes by which a plan is over the host budget; 0 where it is not."""
        return 0 if self.host_budget is None else max(0, self.predict(choices).host_bytes - self.host_budget)

    def learn(self, choices: Mapping[str, Choice], graph: Graph) -> Prediction:
        """Predict a plan from its ghost run, and remember both."""
        prediction = self._prediction(choices, graph, self.memory)
        self._known[plan_hash(choices)] = GhostAnswer(choices=dict(choices), predicted=prediction)
        self._graphs[plan_hash(choices)] = graph
        return prediction

    def within_least_budget(self, choices: Mapping[str, Choice]) -> Prediction:
        """Predict the plan under the least budget that it fits, whatever this predictor is limited to."""
        memory = self.memory.within(None)
        return self._prediction(choices, self.graph(choices), lambda graph: memory.least(graph, memory(graph)))

    def _prediction(self, choices: Mapping[str, Choice], graph: Graph, needs: Callable[[Graph], int]) -> Prediction:
        host_seconds = sum(map(self.op_times.host_seconds_of, choices.values()))
        return Prediction(
            peak_bytes=needs(graph),
            step_seconds=self.simulation(graph).step_seconds + host_seconds,
            host_bytes=host_bytes_of(graph.copies, self.device.kind, self.host_budget),
        )


SAFETY = 0.02
"""Share that is added to the simulated reserved memory: no simulation knows all allocations of libraries."""


def local_memory(
    environment: Environment, budget_bytes: int | None = None, times: OpTimes | None = None
) -> MemoryModel:
    """The memory model of a local device: on an accelerator whole segments of its allocator count, not tensors alone.

    ``budget_bytes`` is its limit (default: the whole device). ``times`` know what its context and matrix libraries
    hold. What other libraries allocate is not known, but real steps measure it.
    """
    device = environment.device if times is None else times.device
    # expandable segments free what lies between tensors before they fail, so fragmentation does not count
    expandable = "expandable_segments:True" in environment.versions.get(ALLOCATOR_SETTINGS, "")
    queued = device.kind not in WITHOUT_STREAMS
    before = (TABLE_BYTES, *(times.workspaces if times is not None else ())) if queued else ()
    memory = MemoryModel(device.capacity_bytes, device.overhead_bytes, queued and not expandable, preallocated=before)
    return memory.within(budget_bytes)


def simulated_memory(hardware: Hardware, budget_bytes: int | None = None) -> MemoryModel:
    """The memory model of described hardware, limited to ``budget_bytes`` (default: the whole device)."""
    safety = SAFETY if hardware.caches else 0.0
    return MemoryModel(hardware.memory_bytes, hardware.context_bytes, hardware.caches, safety).within(budget_bytes)


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the bytes that a step reserves on a device, its context and a share for safety included.

    An allocator that ``caches`` frees cached segments before it exceeds ``budget_bytes`` (None: the whole device). So a
    plan may fit that would reserve more without a limit. ``preallocated`` are allocations from before the step.
    """

    memory_bytes: int
    context_bytes: int
    caches: bool
    safety: float = 0.0
    preallocated: tuple[int, ...] = ()
    budget_bytes: int | None = None

    @property
    def _limit(self) -> int:
        return self.memory_bytes if self.budget_bytes is None else self.budget_bytes

    def __call__(self, graph: Graph) -> int:
        """Bytes for a ghost run; more than ``budget_bytes`` where it does not fit into these."""
        graph = self._with_preallocated(graph)
        if not self.caches:
            return self._promised(graph.peak_bytes)
        asked = [*requests(graph)]
        promised = self._promised(replay(asked).reserved)
        return promised if promised <= self._limit else self._within(asked, self._limit) or promised

    def least(self, graph: Graph, promised: int) -> int:
        """The least limit of the allocator that a ghost run of ``promised`` bytes fits into, to about half a percent.

        More than ``budget_bytes`` where it does not fit into these. Unlike what an allocator reserves, this hardly
        changes between similar plans.
        """
        graph = self._with_preallocated(graph)
        tensors = self._promised(graph.peak_bytes)
        low, high = min(promised, tensors if promised <= self._limit else self._limit), promised
        asked = [*requests(graph)] if self.caches and high > low else []
        while asked and high - low > high // 200:
            middle = (low + high) // 2
            needed = self._within(asked, middle)
            low, high = (middle, high) if needed is None else (low, needed)
        return high

    def _with_preallocated(self, graph: Graph) -> Graph:
        added = [*self.preallocated]
        return with_resident(graph, "allocated before", added, "other") if added else graph

    def _promised(self, held: int) -> int:
        return self.context_bytes + held + int(self.safety * held)

    def _within(self, asked: Sequence[Event], limit: int) -> int | None:
        """Bytes for the requests of a ghost run where the allocator is limited; None where they do not fit."""
        room = max(0, int((limit - self.context_bytes) / (1 + self.safety)))
        peak = replay(asked, limit=room)
        return None if peak.out_of_memory else self._promised(peak.reserved)

    def within(self, budget_bytes: int | None) -> MemoryModel:
        """The same with the allocator limited to ``budget_bytes``."""
        return replace(self, budget_bytes=None if budget_bytes is None else min(budget_bytes, self.memory_bytes))


def memory_note(hardware: Hardware) -> str:
    """A note for the user on what predicted peaks include."""
    if not hardware.caches:
        return "Bytes are those that tensors hold."
    context, safety = f"{hardware.context_bytes / 1e6:.0f} MB", f"{SAFETY * 100:.0f} %"
    return (
        "Peaks are what a caching allocator limited to the budget would reserve, fragmentation included (a plan that "
        f"keeps fewer tensors may reserve more), with the context of {context}, and {safety} for safety. Of 44 "
        "peaks that others published none is more than 1.2 % above, where the versions of their libraries were "
        "simulated; other versions keep 5 to 22 % more or less, so leave some of it free (--headroom of a search, or a "
        "smaller --budget)."
    )
