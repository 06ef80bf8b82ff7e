"""Trace the model of a request: the ghost runs with which every search and every explanation begins.

They are uniform plans, with one choice on every layer, and plans with a choice on the output head alone. The cost model
is built from them.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from autockpt.cost import CostModel, MemoryModel, UniformRuns, build_profile, uniform_graphs
from autockpt.cost.profile import HeadRuns, head_graphs
from autockpt.cost.roofline import nominal_op_times, roofline_times
from autockpt.devices import Device, get_device
from autockpt.devices.accelerator import without_context
from autockpt.errors import AutockptError, UsageError
from autockpt.measuring.environment import environment_of, environment_to_measure_in, environment_without_context
from autockpt.schema import Budget, Environment, Graph, Hardware, OpTimes, SearchSpace, Unit, WorkloadSpec, format_bytes
from autockpt.schema.choices import IN_TILES, RECOMPUTE, SAVE, Choice, ChunkedLoss, parse_choice
from autockpt.schema.request import Listener, SearchRequest, Silence
from autockpt.tracing import Tracer
from autockpt.tracing.cuts import left_out_notes, no_head_notes
from autockpt.tuning.shallow_twin import open_twin, transplanted

CHUNKS = (256, 1024, 4096)
"""Tokens of a chunk where head and loss run in chunks. Small chunks hold few logits, large ones keep a device busy."""
LEANEST_CHUNKS = ChunkedLoss(tokens=CHUNKS[0])


def kinds_of(space: SearchSpace, inexact: bool) -> tuple[str, ...]:
    """The kinds of choices for layers in a space; with ``inexact`` also their variants that run in tiles."""
    return (*space.choices, *(name for name, c in IN_TILES.items() if inexact and c.kind in space.choices))


def device_of(request: SearchRequest) -> Device:
    """The local device of a request; the CPU for described hardware, which needs none."""
    if request.hardware is not None:
        return get_device("cpu")
    return get_device(request.device if request.step is None else str(request.step.device))


def tracer_of(request: SearchRequest, *, fallback: bool = True) -> Tracer:
    """A tracer of the request's training step. Raises what ``Tracer.from_spec`` and ``Tracer.from_step`` do."""
    if request.workload is None:
        return Tracer.from_step(request.step, fallback=fallback)
    device = device_of(request).torch_device
    return Tracer.from_spec(request.workload, hardware=request.hardware, device=device, fallback=fallback)


def local_device(request: SearchRequest) -> tuple[Environment, int]:
    """The environment of the request's local device, and the bytes that other processes hold on it.

    Opens no context in this process.
    """
    device = device_of(request)
    if request.step is not None:
        environment = environment_of(device)
    else:
        environment = environment_without_context(request.device) or environment_to_measure_in(request.device)
    return environment, without_context(device.kind, device.used_by_others) or 0


@dataclass(frozen=True)
class TracedModel:
    """The initial ghost runs, and the search space without choices that the model refuses.

    ``uniform`` are plans with one choice on every layer, ``heads`` those with a choice on the output head alone. Where
    a shallow ``twin`` stands for a deep model they are of the twin, and ``base`` is the deep model's plain step.
    """

    tracer: Tracer
    uniform: UniformRuns
    heads: HeadRuns
    space: SearchSpace
    notes: tuple[str, ...] = ()
    twin: Tracer | None = None
    base: Graph | None = None

    @property
    def plain(self) -> Graph:
        """The whole model's plain step."""
        return self.base or self.uniform["save"][1]

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Notes on the model, its plain step and the choices that it refuses."""
        return (*self.tracer.notes, *self.left_out, *self.plain.notes, *self.notes)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Notes on modules that hold much and are no units, unless the user named the units, and on an unknown head."""
        modules = () if self.tracer.settings.get("units") else left_out_notes(self.plain, self.tracer.outside)
        return (*modules, *(no_head_notes(self.plain) if self.space.head and self.tracer.head is None else ()))

    @property
    def graphs(self) -> list[Graph]:
        """All ghost runs but those of heads."""
        return [*(graph for _, graph in self.uniform.values()), *([self.base] if self.base is not None else [])]

    @property
    def of_heads(self) -> list[Graph]:
        """Ghost runs with a choice on the output head alone."""
        return [graph for _, graph in self.heads.values()]

    def nominal(self, environment: Environment) -> OpTimes:
        """Op times at nominal rates of the kind of device, for ranking choices only."""
        return nominal_op_times(environment, [*self.graphs, *self.of_heads])

    def roofline(self, hardware: Hardware) -> OpTimes:
        """Op times of described hardware. The overhead of a recomputed region is taken from whole layers."""
        parts = [graph for name, (_, graph) in self.uniform.items() if name in IN_TILES]
        times = roofline_times(hardware, [graph for graph in self.graphs if all(graph is not part for part in parts)])
        return times.completed(roofline_times(hardware, [*parts, *self.of_heads]).seconds)

    def cost_model(self, times: OpTimes, *, memory: MemoryModel | None = None, **more: Any) -> CostModel:
        """The cost model by these op times; ``memory`` and ``more`` as for ``build_profile``."""
        more |= {"heads": self.heads, "gathered": self.space.gathered}
        if self.base is None:
            return build_profile(self.tracer, times, self.uniform, memory=memory, **more)
        small = build_profile(self.twin or self.tracer, times, self.uniform, **more)
        return transplanted(small, self.base, self.tracer, memory, more.get("listener", Silence()))


def trace_model(
    tracer: Tracer,
    space: SearchSpace,
    inexact: bool = False,
    of_head: Choice = SAVE,
    listener: Listener = Silence(),
) -> TracedModel:
    """Make the initial ghost runs.

    ``inexact`` lets head, MLPs and norms run on some tokens at a time. ``of_head`` is a further choice for the head.
    ``listener`` is notified of each ghost run. Raises UsageError for a model without blocks.
    """
    blocks = blocks_of(tracer)
    chunked = (ChunkedLoss(tokens=tokens) for tokens in CHUNKS)
    choices = dict.fromkeys([*map(parse_choice, space.head), *(chunked if inexact else ()), of_head])
    of_heads = [choice for choice in choices if choice != SAVE and tracer.head is not None]
    kinds = kinds_of(space, inexact)
    listener.stage("ghost-run each choice", len(kinds) + len(of_heads))
    uniform = uniform_graphs(tracer, blocks, kinds, listener=listener)
    heads = head_graphs(tracer, tracer.head, of_heads, listener)
    notes = list[str]()
    if refused := [kind for kind in space.choices if kind not in uniform]:
        notes.append(f"Not for this model: {', '.join(refused)} (apply such a plan to see why).")
        space = space.without(refused)
    if inexact and tracer.head is None and not IN_TILES.keys() & uniform.keys():
        notes.append("--allow-inexact changes nothing: the model has no output head, and no layers with MLPs or norms.")
    return TracedModel(tracer, uniform, heads, space, tuple(notes))


def trace_for_hardware(
    stack: ExitStack, hardware: Hardware, spec: WorkloadSpec, tracer: Tracer, space: SearchSpace, **more: Any
) -> TracedModel:
    """The same for described hardware, where a shallow twin, which ``stack`` closes, stands for a deep model.

    ``more`` as for ``trace_model``.
    """
    opened = open_twin(stack, spec, tracer, hardware)
    if opened is not None:
        twin, base = opened
        if RECOMPUTE.kind in space.choices:  # a profile holds the leanest plan's bytes
            tracer.ahead([dict.fromkeys((unit.name for unit in blocks_of(tracer)), RECOMPUTE)])
        with suppress(AutockptError):
            return replace(trace_model(twin, space, **more), tracer=tracer, twin=twin, base=base)
    return trace_model(tracer, space, **more)


def blocks_of(tracer: Tracer) -> tuple[Unit, ...]:
    """The blocks that choices are made for. Raises UsageError where there are none."""
    blocks = tuple(u for u in tracer.units if u.role == "block")
    if not blocks:
        raise UsageError(
            "the model has no repeated blocks, and no module that keeps much more for backward than it is given: "
            "there is nothing to choose for",
            remedy="Name modules as `units` (any whose forward is called), or move a part of the model's own forward "
            "into a module; `autockpt explain --ops` shows every op and the bytes that are kept.",
        )
    return blocks


def less_than_asked(budget: Budget, environment: Environment) -> tuple[str, ...]:
    """A note where the device has less memory than the budget, so that plans must fit the device."""
    device = environment.device
    if budget.kind != "bytes" or (budget.size or 0) <= device.capacity_bytes:
        return ()
    return (f"{device.name} has {format_bytes(device.capacity_bytes)}, less than the budget: planned for what it has.",)
