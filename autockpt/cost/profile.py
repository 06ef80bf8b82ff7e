"""Build the cost model: ghost-run every choice on one layer of each kind, and measure the op times of the step.

``build_profile`` makes the ``CostModel``, which predicts plans and poses the planning problem to the solver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from autockpt.cost.fronts import FEWER_SETS, MOST_SETS, remake_front, selective_front
from autockpt.cost.menus import (
    build_menus,
    gathered_again,
    head_menu,
    overlapping_collectives,
    representatives,
    with_gathered,
)
from autockpt.cost.op_times import ANCHORS, TIMED_OPS, cached_op_times, calibrated, store
from autockpt.cost.predictor import MemoryModel, Predictor
from autockpt.cost.problem import build_problem, passed_on, point_bytes
from autockpt.cost.simulation import simulate
from autockpt.devices import host_bytes_of
from autockpt.errors import ConflictError, DeviceOutOfMemory
from autockpt.measuring.base import TIMED_CYCLE, Measurer, beats_counted, cycles_to_time
from autockpt.schema import Graph, Measurement, Menu, OpTimes, Profile, Unit, dump_choices, format_bytes
from autockpt.schema.choices import (
    GATHERED,
    RECOMPUTE,
    SAVE,
    Choice,
    Offload,
    RecomputeOffload,
    Remake,
    Segment,
    Selective,
    on_all_layers,
)
from autockpt.schema.device import WITHOUT_STREAMS, DeviceInfo
from autockpt.schema.plan import plan_hash
from autockpt.schema.request import Listener, Silence
from autockpt.solvers import Checked, Segments, exact, refine
from autockpt.solvers.problem import Problem, peak_of
from autockpt.solvers.segments import Member, segmented
from autockpt.tracing import Tracer

T = TypeVar("T")
NUMBERS = re.compile(r"\d+")
SLOWED = 3.0  # the factor by which steps may be slower than op times predict: on a busy machine, not warmed up
LEAN_CALLS = 4  # ghost runs for finding the leanest plan
UNIFORM_CALLS = 2  # ghost runs of uniform plans before a budget is refused
_LEANEST = 2  # plans whose least budget is looked for


UniformRuns = Mapping[str, tuple[dict[str, Choice], Graph]]  # uniform plans and their ghost runs by choice kind
HeadRuns = Mapping[Choice, tuple[dict[str, Choice], Graph]]  # those in which the output head alone has a choice


@dataclass(frozen=True)
class CostModel:
    """What is known of a workload's costs. ``base`` is the ghost run of plain training; sizes are in bytes.

    ``segments`` are the options of several units together, where these are searched.
    """

    profile: Profile
    base: Graph
    predictor: Predictor
    used_by_others: int = 0
    segments: Segments = field(default_factory=dict)
    _checks: dict[str, Checked] = field(default_factory=dict, repr=False, compare=False)

    @property
    def host_budget(self) -> int | None:
        """Most bytes that offloading may claim on the host."""
        return self.predictor.host_budget

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The repeated units that plans are made for, in order of execution."""
        return self.base.blocks()

    @cached_property
    def head(self) -> Unit | None:
        """The output head if it has choices, with a kind and so a menu of its own."""
        return self.profile.head(self.blocks)

    def plan(self, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """The solver's choices as a plan, in which an output head that saves is not named."""
        head = self.head.name if self.head is not None else None
        return {name: choice for name, choice in choices.items() if name != head or choice != SAVE}

    def problem(self, budget_bytes: int, scale: Mapping[str, float] | None = None, *, hidden: float = 0.0) -> Problem:
        """The planning problem of this workload. ``budget_bytes`` are without the device's own overhead.

        ``hidden`` is the share of the link's time in forward that hidden copies may take.
        """
        return build_problem(
            self.base,
            self.profile.menus,
            budget_bytes=budget_bytes,
            scale=scale,
            host_budget=self.host_budget,
            base_seconds=self.profile.save_all_seconds,
            head=self.head,
            hidden_bandwidth=hidden * self.profile.op_times.copy_out_bandwidth,
        )

    def check(self, choices: Mapping[str, Choice]) -> Checked:
        """Check a plan by its ghost run, for ``solvers.refine``: bytes without the device's own overhead."""
        key = plan_hash(choices)
        if key not in self._checks:
            graph = self.predictor.graph(choices)
            prediction = self.predictor.known(choices) or self.predictor.learn(choices, graph)
            peak = self.predictor.memory.least(graph, prediction.peak_bytes) - self.predictor.device.overhead_bytes
            self._checks[key] = Checked(peak, point_bytes(self.base, graph, self.head), prediction.host_bytes)
        return self._checks[key]

    def keep_within(self, budget_bytes: int) -> None:
        """From now on predict and check with an allocator that is limited to ``budget_bytes``."""
        self.predictor.keep_within(budget_bytes)
        self._checks.clear()

    def smallest_peak(
        self, known: Iterable[Mapping[str, Choice]], calls: int = LEAN_CALLS, *, plain_head: bool = False
    ) -> int:
        """The least reachable peak in bytes, overhead included: the leanest the solver finds, or of ``known`` plans.

        Plans over the host budget do not count. ``calls`` are the ghost runs to spend. With ``plain_head`` only plans
        without a choice for the output head count.
        """
        known = [*known, {}]
        self.predictor.ahead(known)
        problem = self.problem(0)
        if plain_head and self.head is not None:
            *blocks, head = problem.units
            saving = head.model_copy(update={"options": head.options[:1]})
            problem = problem.model_copy(update={"units": (*blocks, saving)})
        lean = refine(problem, self.check, max_calls=calls)
        plans = (lean.choices, *known)
        return min(self.predictor.predict(plan).peak_bytes for plan in plans if not self.predictor.over_host(plan))

    def smallest_budget(self) -> int | None:
        """The least budget, overhead included, that the leanest plans so far fit into; None without any.

        It is less than their peaks, as an allocator without a limit reserves more.
        """
        host = math.inf if self.host_budget is None else self.host_budget
        runs = [run for run in self.predictor.ghost_runs if run.predicted.host_bytes <= host]
        leanest = sorted(runs, key=lambda run: run.predicted.peak_bytes)[:_LEANEST]
        return min((self.predictor.within_least_budget(run.choices).peak_bytes for run in leanest), default=None)

    def last_resorts(self) -> Iterator[dict[str, Choice]]:
        """Plans that may fit where the solver's do not: with segments, and uniform ones (with a choice of the output
        head): those that were ghost-run, and of others the ``UNIFORM_CALLS`` leanest by the menus."""
        problem = self.problem(0)
        found = sorted(map(exact, segmented(problem, self.segments)), key=lambda a: a.peak)
        yield from (self.plan(lean.choices) for lean in found[:1])
        offered = {unit.name: [option.choice for option in unit.options] for unit in problem.units}
        heads = [{problem.head: choice} for choice in offered.pop(problem.head)] if problem.head is not None else [{}]
        common = [choice for choice in offered[self.blocks[0].name] if all(choice in menu for menu in offered.values())]
        plans = [dict.fromkeys(offered, choice) | head for choice in common for head in heads]
        ranked = sorted(plans, key=partial(peak_of, problem))
        known = [plan for plan in ranked if self.predictor.known(plan) is not None]
        yield from map(self.plan, [*known, *[plan for plan in ranked if plan not in known][:UNIFORM_CALLS]])

    def describe_bytes(self, smallest_peak: int) -> str:
        """A sentence on what the bytes of the leanest plan are."""
        gradients = sum(s.bytes for s in self.base.held_gradients())
        own = self.predictor.device.overhead_bytes
        parts = dict(self.base.resident) | {"gradients": gradients, "the device's own context": own}
        rest = smallest_peak - sum(parts.values())
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        return f"It holds {listed}, and at least {format_bytes(max(0, rest))} of activations and transients."


def measure_op_times(
    runs: Measurer,
    uniform: UniformRuns,
    workload: str,
    *,
    room: int,
    host_budget: int | None = None,
    heads: Mapping[Choice, tuple[dict[str, Choice], Graph]] = {},
    listener: Listener = Silence(),
    left: Callable[[], float] = lambda: math.inf,
) -> tuple[OpTimes | None, dict[str, Measurement]]:
    """Op times of this workload on the device, cached or measured, and the measurements of whole plans.

    Ops are timed with the leanest of the ``uniform`` plans attached, and again with each choice of the output head.
    Then uniform plans that fit into ``room`` bytes are measured whole, for costs that single ops do not show. The disk
    is timed if the host budget makes plans with it worthwhile. ``left`` gives the seconds left: with few of them whole
    plans are not measured, or there are no op times (None). ``listener`` is notified of each timed cycle.
    Raises DeviceOutOfMemory where even the leanest plan does not run.
    """
    device = runs.environment.device
    allowed = {kind: pair for kind, pair in uniform.items() if not _over_host(pair[1], device, host_budget)}
    lean, graph = leanest_uniform(allowed)
    disk = wants_disk(uniform, device, host_budget)
    runnable = [graph, *(run for _, run in heads.values())]
    if (known := cached_op_times(runs.environment, runnable, workload, disk=disk)) is not None:
        return known, {}

    # without a choice the head may not fit
    of_heads = [plan for plan, _ in heads.values()]
    first, *others = [{}, *of_heads] if graph.peak_bytes <= room or not heads else of_heads
    listener.stage("time single ops", 1 + len(others))
    seconds = left()
    payload: dict[str, Any] = {"choices": dump_choices({**lean, **first}), "disk": disk}
    if math.isfinite(seconds):
        payload["within"] = seconds
    with beats_counted(runs, listener, TIMED_OPS):
        found = runs.call("autockpt.cost.op_times:measure_in_runner", payload) if seconds > 0 else {}
        if not found:
            return None, {}
        times = OpTimes(environment=runs.environment, **found)
        for choices in others:
            if left() <= 0:
                return times, {}
            with suppress(DeviceOutOfMemory):
                more = {"choices": dump_choices({**lean, **choices})}
                times = times.completed(runs.call("autockpt.cost.op_times:measure_more_in_runner", more))
    graphs = {kind: graph for kind, (_, graph) in uniform.items()}
    fitting = {kind: choices for kind, (choices, graph) in allowed.items() if graph.peak_bytes <= room}
    anchors = {kind: fitting[kind] for kind in ANCHORS if kind in fitting}
    measured = dict[str, Measurement]()
    if "save" in anchors and len(anchors) > 1:
        cycle = simulate(graph, times).step_seconds
        steps = cycles_to_time(cycle)
        if SLOWED * cycle * (steps + 1) * len(anchors) > left():
            return times, {}
        listener.stage("time whole plans", steps * len(anchors))
        with beats_counted(runs, listener, TIMED_CYCLE):
            for kind, choices in anchors.items():
                try:
                    measured[kind] = runs.measure(choices, steps=steps)
                except DeviceOutOfMemory as error:
                    if error.last is not None:  # no step is possible after it: keep the op times
                        break
        times = calibrated(times, graphs, {kind: plan.step_seconds for kind, plan in measured.items()})
    store(times, workload)
    return times, measured


def wants_disk(uniform: UniformRuns, device: DeviceInfo, host_budget: int | None) -> bool:
    """Whether to try the disk tier: where offloading everything exceeds the host budget.

    Not on the CPU, whose only tier is a file already.
    """
    return device.kind not in WITHOUT_STREAMS and any(
        _over_host(graph, device, host_budget) for _, graph in uniform.values()
    )


def _over_host(graph: Graph, device: DeviceInfo, host_budget: int | None) -> bool:
    return host_budget is not None and host_bytes_of(graph.copies, device.kind, host_budget) > host_budget


def used_by_others(runs: Measurer) -> int:
    """Bytes on the device that other processes than the measuring one hold."""
    return int(runs.call("autockpt.cost.op_times:memory_of_others", {})["bytes"])


def leanest_uniform(graphs: UniformRuns) -> tuple[dict[str, Choice], Graph]:
    """The uniform plan with the smallest peak; recompute if it is among them, as it runs every op."""
    if "recompute" in graphs:
        return graphs["recompute"]
    return min(graphs.values(), key=lambda pair: pair[1].peak_bytes)


def uniform_graphs(
    tracer: Tracer,
    blocks: Sequence[Unit],
    kinds: Sequence[str],
    besides: Mapping[str, Choice] | None = None,
    listener: Listener = Silence(),
) -> UniformRuns:
    """Ghost runs of uniform plans by kind, without those that the model refuses.

    ``besides`` are choices for other units in each of them. ``listener`` is notified of each ghost run.
    Raises ConflictError where the model refuses all but ``save``.
    """
    names = [unit.name for unit in blocks]
    plans = {kind: {**dict.fromkeys(names, on_all_layers(kind)), **(besides or {})} for kind in kinds}
    found, refused = _ghost_runs(tracer, plans, listener)
    if refused is not None and set(found) <= {SAVE.kind}:
        raise refused
    return found


def head_graphs(
    tracer: Tracer, head: Unit | None, choices: Iterable[Choice], listener: Listener = Silence()
) -> HeadRuns:
    """Ghost runs with each choice on the output head alone, without those that the model refuses."""
    plans = {} if head is None else {choice: {head.name: choice} for choice in choices}
    return _ghost_runs(tracer, plans, listener)[0]


def _ghost_runs(
    tracer: Tracer, plans: Mapping[T, dict[str, Choice]], listener: Listener
) -> tuple[dict[T, tuple[dict[str, Choice], Graph]], ConflictError | None]:
    """The plans that the model does not refuse with their ghost runs, and its last refusal."""
    found: dict[T, tuple[dict[str, Choice], Graph]] = {}
    refused = None
    tracer.ahead(plans.values())
    for key, plan in plans.items():
        try:
            found[key] = plan, tracer.trace(plan)
        except ConflictError as error:
            refused = error
        listener.advance()
    return found, refused


def build_profile(
    tracer: Tracer,
    times: OpTimes,
    uniform: UniformRuns,
    *,
    used_by_others: int = 0,
    host_budget: int | None = None,
    extra: Iterable[Choice] = (),
    memory: MemoryModel | None = None,
    heads: Mapping[Choice, tuple[dict[str, Choice], Graph]] = {},
    gathered: bool = True,
    listener: Listener = Silence(),
    late: Callable[[], bool] = lambda: False,
) -> CostModel:
    """Ghost-run each choice on one unit of each kind, and derive its costs.

    ``uniform`` are the ghost runs of ``uniform_graphs``, ``heads`` those of ``head_graphs``, ``memory`` is as for
    ``Predictor``. Menus also get the ``extra`` choices, choices with the disk tier where the host budget (bytes) binds
    and the disk was timed, and under FSDP2 with ``gathered`` every choice with its weights kept gathered. ``listener``
    is notified of the ghost runs. Once it is ``late`` no choices but recomputing are ghost-run.
    """
    base = uniform["save"][1]
    predictor = Predictor(tracer, times, host_budget, memory)
    for choices, graph in uniform.values():
        predictor.learn(choices, graph)
    units = representatives(base.blocks()).values()
    variants: dict[tuple[int, Choice], Graph] = {}
    if {Selective().kind, Remake().kind} & {*uniform}:  # their options are found in a unit that is recomputed
        tracer.ahead({unit.name: RECOMPUTE} for unit in units)
        variants = {(unit.kind, RECOMPUTE): predictor.graph({unit.name: RECOMPUTE}) for unit in units}
    regathered = gathered_again(base) if gathered else set()
    disk = bool(times.disk_out_bandwidth) and wants_disk(uniform, predictor.device, host_budget)
    wanted = list[tuple[Unit, Choice]]()
    for unit in units:
        choices = [*_choices_to_try(unit, uniform.keys(), variants.get((unit.kind, RECOMPUTE)), times, disk)]
        choices += [GATHERED] if unit.name in regathered else []
        choices = [choice for choice in dict.fromkeys((*choices, *extra)) if choice != SAVE]
        wanted += ((unit, choice) for choice in choices if (unit.kind, choice) not in variants)
    tracer.ahead({unit.name: choice} for unit, choice in wanted)
    listener.stage("ghost-run each choice on one layer", len(wanted))
    with predictor.watched(listener):
        for unit, choice in wanted:
            if choice == RECOMPUTE or not late():
                with suppress(ConflictError) if choice.gathered else nullcontext():  # a layer that is not sharded
                    variants[unit.kind, choice] = predictor.graph({unit.name: choice})
    menus = build_menus(base, variants, predictor.simulation, times.host_seconds_of)
    if RECOMPUTE.kind in uniform:
        menus = overlapping_collectives(menus, base, uniform[RECOMPUTE.kind][1], predictor.simulation)
    if regathered:
        kept = {block.name: GATHERED for block in base.blocks() if (block.kind, GATHERED) in variants}
        menus = with_gathered(menus, base, predictor.graph(kept), predictor.simulation)
    if heads:
        (name,) = {name for plan, _ in heads.values() for name in plan}
        unit = Unit(name=name, cls="", kind=1 + max(menu.kind for menu in menus), role="head")
        menus = (*menus, head_menu(base, unit, {c: graph for c, (_, graph) in heads.items()}, predictor.simulation))
        for plan, graph in heads.values():
            predictor.learn(plan, graph)
    profile = Profile(
        op_times=times,
        menus=menus,
        save_all_peak_bytes=base.peak_bytes,
        save_all_seconds=predictor.simulation(base).step_seconds,
    )
    segments = segments_of(base, menus) if Segment().kind in uniform else {}
    return CostModel(profile, base, predictor, used_by_others, segments)


def _choices_to_try(
    unit: Unit, kinds: Collection[str], recomputed: Graph | None, times: OpTimes, disk: bool
) -> Iterator[Choice]:
    """Choices for a unit's menu: each of ``kinds`` by its default options, and with the options that may be worth more.

    ``recomputed`` is a ghost run in which the unit recomputes, from which options of partial recomputation are read.
    ``disk``: choices that offload come with the disk tier, too.
    """
    yield from (choice for kind in kinds if (choice := on_all_layers(kind)) not in (SAVE, Segment()))
    if recomputed is not None and Selective().kind in kinds:
        most = FEWER_SETS if Remake().kind in kinds else MOST_SETS
        yield from selective_front(recomputed, unit, times, most)
    if recomputed is not None and Remake().kind in kinds:
        yield from remake_front(recomputed, unit, times)
    if disk:
        yield from (choice for choice in (Offload(tier="disk"), RecomputeOffload(tier="disk")) if choice.kind in kinds)


def segments_of(base: Graph, menus: Iterable[Menu]) -> Segments:
    """The costs of segments of the model's first blocks, as far as these are named alike. Empty without recompute."""
    by_kind = {menu.kind: {item.choice: item for item in menu.items} for menu in menus}
    blocks = base.blocks()
    family = [unit for unit in blocks if NUMBERS.sub("", unit.name) == NUMBERS.sub("", blocks[0].name)]
    if any(RECOMPUTE not in by_kind.get(unit.kind, {}) for unit in family):
        return {}
    passed = passed_on(base, [unit.name for unit in family])
    members = {}
    for unit in family:
        items = by_kind[unit.kind]
        rest = max(0.0, items[SAVE].forward_seconds - items[RECOMPUTE].recompute_seconds)
        members[unit.name] = Member(rest, passed.get(unit.name, 0))
    return members
