"""From ghost runs and op times to a Profile: what each choice costs on each kind of unit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from autockpt.devices import host_bytes_of
from autockpt.errors import ConflictError, DeviceOutOfMemory
from autockpt.profiling import cache
from autockpt.profiling.calibration import ANCHORS, calibrated
from autockpt.profiling.fronts import MOST_SETS, MOST_SETS_BESIDE, remake_front, selective_front
from autockpt.profiling.menus import build_menus, representatives
from autockpt.profiling.predictor import Needs, Predictor, simulation_of
from autockpt.profiling.problem import build_problem, point_bytes
from autockpt.schema import (
    RECOMPUTE,
    SAVE,
    Choice,
    DeviceInfo,
    Environment,
    Graph,
    Offload,
    OpTimes,
    Problem,
    Profile,
    RecomputeOffload,
    Remake,
    Selective,
    Unit,
    dump_choice,
    format_bytes,
    parse_choice,
    plan_hash,
)
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.solvers import Ruling, refine

TIMED_CYCLES = 2
ANCHOR_SECONDS = 12.0  # for the uniform plans in turns, at least one round of them and at most five
LEAN_CALLS = 4  # ghost runs spent on finding the leanest plan


Uniform = Mapping[str, tuple[dict[str, Choice], Graph]]  # uniform plans and their ghost runs by choice kind


class Traces(Protocol):
    """Whoever can ghost-run a plan."""

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph: ...


class Runs(Protocol):
    """Whoever can run a function beside the model on the device."""

    @property
    def environment(self) -> Environment: ...

    def call(self, ref: str, payload: dict) -> dict: ...

    def compare(self, plans: Mapping[str, Mapping[str, Choice]], *, rounds: int) -> Mapping[str, Sequence[float]]: ...


@dataclass(frozen=True)
class Profiled:
    """A profiled workload: ``base`` is the ghost run with every layer on save; sizes in bytes.

    ``fixed`` are choices besides those for layers, in ``base`` and in every plan that the solver makes.
    """

    profile: Profile
    base: Graph
    predictor: Predictor
    used_by_others: int = 0
    fixed: Mapping[str, Choice] = field(default_factory=dict)
    _rulings: dict[str, Ruling] = field(default_factory=dict, repr=False, compare=False)

    @property
    def host_budget(self) -> int | None:
        """Most bytes that offloading may claim on the host."""
        return self.predictor.host_budget

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The units that plans are made for, in order of execution."""
        return self.base.blocks()

    def whole(self, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """A plan of the solver's with the choices that all have."""
        return {**choices, **self.fixed}

    def problem(self, budget: int, price: Mapping[str, float] | None = None, margin: int = 0) -> Problem:
        """The planning problem of this workload. ``budget`` in bytes, without the device's own overhead."""
        return build_problem(
            self.base,
            self.profile.menus,
            budget=budget,
            price=price,
            margin=margin,
            host_budget=self.host_budget,
            base_seconds=self.profile.save_all_seconds,
        )

    def rule(self, choices: Mapping[str, Choice]) -> Ruling:
        """What the ghost run of a plan says, for ``solvers.refine``: bytes without the device's own overhead."""
        choices = self.whole(choices)
        key = plan_hash(choices)
        if key not in self._rulings:
            graph = self.predictor.graph(choices)
            said = self.predictor.known(choices) or self.predictor.learn(choices, graph)
            peak = self.predictor.least_bytes(graph, said.peak_bytes)
            self._rulings[key] = Ruling(peak, None, point_bytes(self.base, graph), said.host_bytes)
        return self._rulings[key]

    def keep_within(self, budget: int) -> None:
        """From now on rule and predict for a device whose allocator is kept to ``budget`` bytes."""
        if self.predictor.needs is not None:
            self.predictor.keep_within(budget)
            self._rulings.clear()

    def smallest_peak(self, known: Iterable[Mapping[str, Choice]], calls: int = LEAN_CALLS) -> int:
        """The least reachable peak in bytes, overhead included: the leanest the solver finds, or of ``known`` plans.

        Plans over the host budget do not count; saving everything never is. ``calls``: ghost runs to spend.
        """
        lean = refine(self.problem(0), self.rule, max_calls=calls)
        nothing = dict.fromkeys((unit.name for unit in self.blocks), SAVE)
        plans = (self.whole(lean.choices), *known, self.whole(nothing))
        return min(self.predictor.predict(plan).peak_bytes for plan in plans if not self.predictor.over_host(plan))

    def needs(self, smallest_peak: int) -> str:
        """What the leanest plan's bytes go to, in one line."""
        gradients = sum(s.bytes for s in self.base.storages if s.kind == "gradient")
        parts = dict(self.base.resident) | {"gradients": gradients}
        rest = smallest_peak - sum(parts.values())
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        return f"It holds {listed}, and at least {format_bytes(max(0, rest))} of activations and transients."


def measure_op_times(
    runs: Runs, uniform: Uniform, workload: str, *, room: int, host_budget: int | None = None
) -> OpTimes:
    """Op times of this workload on the device: from the cache, or measured in real steps.

    Ops are timed with the leanest of the ``uniform`` plans attached; then those that fit into ``room`` bytes are timed
    whole, in turns, for what single ops do not tell. The disk is timed where the host budget makes it worth having.
    Raises DeviceOutOfMemory where even the leanest does not run.
    """
    device = runs.environment.device
    lean, graph = leanest(within_host(uniform, device, host_budget))
    disk = wants_disk(uniform, device, host_budget)
    if (known := cached_op_times(runs.environment, graph, workload, disk=disk)) is not None:
        return known
    payload: dict[str, Any] = {
        "choices": {name: dump_choice(c) for name, c in lean.items()},
        "cycles": TIMED_CYCLES,
        "disk": disk,
    }
    found = runs.call("autockpt.profiling.op_times:measure_in_runner", payload)
    times = OpTimes(environment=runs.environment, **found)
    graphs = {kind: graph for kind, (_, graph) in uniform.items()}
    allowed = within_host(uniform, device, host_budget)
    fitting = {kind: choices for kind, (choices, graph) in allowed.items() if graph.peak_bytes <= room}
    anchors = {kind: fitting[kind] for kind in ANCHORS if kind in fitting}
    if "save" in anchors and len(anchors) > 1:
        cycle = simulation_of(graph, times).step_seconds
        rounds = round(ANCHOR_SECONDS / (2 * len(anchors) * cycle)) if cycle > 0 else 1
        with suppress(DeviceOutOfMemory):
            seconds = runs.compare(anchors, rounds=max(1, min(5, rounds)))
            times = calibrated(times, graphs, seconds)
    cache.store(times, _key(workload))
    return times


def wants_disk(uniform: Uniform, device: DeviceInfo, host_budget: int | None) -> bool:
    """Whether plans with the disk tier are worth a look: where the host cannot take what offloading everything sends.

    Not where the one tier there is a file already, as on the CPU.
    """
    return device.kind not in WITHOUT_STREAMS and any(
        _over_host(graph, device, host_budget) for _, graph in uniform.values()
    )


def within_host(uniform: Uniform, device: DeviceInfo, host_budget: int | None) -> Uniform:
    """The uniform plans that may run under a host budget."""
    return {kind: pair for kind, pair in uniform.items() if not _over_host(pair[1], device, host_budget)}


def _over_host(graph: Graph, device: DeviceInfo, host_budget: int | None) -> bool:
    return host_budget is not None and host_bytes_of(graph.copies, device.kind, host_budget) > host_budget


def cached_op_times(environment: Environment, graph: Graph, workload: str, *, disk: bool = False) -> OpTimes | None:
    """Op times of an earlier run on the same device and versions, if they cover ``graph`` and this workload, and where
    asked for the disk."""
    known = cache.lookup(environment, _key(workload), graph.signatures)
    return None if known is not None and disk and not known.disk_out_bandwidth else known


def _key(workload: str) -> str:
    return hashlib.sha256(workload.encode()).hexdigest()[:12]


def used_by_others(runs: Runs) -> int:
    """Bytes on the device that processes other than the measuring one hold."""
    return int(runs.call("autockpt.profiling.op_times:memory_of_others", {})["bytes"])


def leanest(graphs: Uniform) -> tuple[dict[str, Choice], Graph]:
    """The uniform plan with the smallest peak; recompute where it is among them, since it runs every op there is."""
    if "recompute" in graphs:
        return graphs["recompute"]
    return min(graphs.values(), key=lambda pair: pair[1].peak_bytes)


def uniform_graphs(traces: Traces, blocks: Sequence[Unit], kinds: Sequence[str]) -> Uniform:
    """Ghost runs of every unit on the same choice, by choice kind. Kinds that this model refuses are left out.

    Raises ConflictError where it refuses all but ``save``.
    """
    found: dict[str, tuple[dict[str, Choice], Graph]] = {}
    refused = None
    for kind in kinds:
        choices = dict.fromkeys((u.name for u in blocks), parse_choice(kind))
        try:
            found[kind] = (choices, traces.trace(choices))
        except ConflictError as error:
            refused = error
    if refused is not None and set(found) <= {SAVE.kind}:
        raise refused
    return found


def build_profile(
    traces: Traces,
    times: OpTimes,
    uniform: Uniform,
    *,
    used_by_others: int = 0,
    host_budget: int | None = None,
    extra: Iterable[Choice] = (),
    needs: Needs | None = None,
    fixed: Mapping[str, Choice] | None = None,
) -> Profiled:
    """Ghost-run each choice on one unit of each kind and read off what it costs.

    ``uniform`` are the ghost runs of ``uniform_graphs``, save among them; ``extra`` choices are put on the menus, too.
    ``needs`` as for ``Predictor``; ``fixed`` choices besides those for layers, which the ``uniform`` plans have, too.
    Where the host budget (bytes) binds, choices that offload come with the disk tier as well, if its bandwidth is
    known.
    """
    base = uniform["save"][1]
    others = dict(fixed or {})
    predictor = Predictor(traces.trace, times, host_budget, needs)
    for choices, graph in uniform.values():
        predictor.learn(choices, graph)
    variants: dict[tuple[int, Choice], Graph] = {}
    for unit in representatives(base.blocks()).values():
        choices = [choice for kind in uniform if (choice := parse_choice(kind)) != SAVE]
        if Selective().kind in uniform:
            again = variants.setdefault((unit.kind, RECOMPUTE), predictor.graph({unit.name: RECOMPUTE, **others}))
            most = MOST_SETS_BESIDE if Remake().kind in uniform else MOST_SETS
            choices += selective_front(again, unit, times, most)
        if Remake().kind in uniform:
            again = variants.setdefault((unit.kind, RECOMPUTE), predictor.graph({unit.name: RECOMPUTE, **others}))
            choices += remake_front(again, unit, times)
        if times.disk_out_bandwidth and wants_disk(uniform, predictor.device, host_budget):
            moving: tuple[Choice, ...] = (Offload(tier="disk"), RecomputeOffload(tier="disk"))
            choices += [choice for choice in moving if choice.kind in uniform]
        for choice in (*choices, *(c for c in extra if c != SAVE)):
            if (unit.kind, choice) not in variants:
                variants[unit.kind, choice] = predictor.graph({unit.name: choice, **others})
        if RECOMPUTE.kind not in uniform:
            variants.pop((unit.kind, RECOMPUTE), None)
    menus = build_menus(base, variants, predictor.simulation)
    profile = Profile(
        op_times=times,
        menus=menus,
        save_all_peak_bytes=base.peak_bytes,
        save_all_seconds=predictor.simulation(base).step_seconds,
        leanest_peak_bytes=min(graph.peak_bytes for _, graph in uniform.values()),
    )
    return Profiled(profile, base, predictor, used_by_others, others)
