"""Searching for hardware that is not at hand: ghost runs and modelled op times in place of real steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from autockpt.errors import InfeasibleError
from autockpt.measuring.environment import installed_versions
from autockpt.profiling import (
    Profiled,
    Traces,
    Uniform,
    build_profile,
    promised_bytes,
    said_of,
    torch_device,
    tracer_for,
    uniform_graphs,
)
from autockpt.profiling.roofline import roofline_times
from autockpt.schema import SAVE, Budget, Graph, OpTimes, SearchOutcome, SearchRequest, SearchSpace, format_bytes
from autockpt.schema.hardware import Hardware
from autockpt.tracing import Tracer
from autockpt.tracing.tracer import uncollected
from autockpt.tuning.depth import DEEP, calls_per_candidate, transplanted, twin_uniform
from autockpt.tuning.head import Settled, settle, units_of
from autockpt.tuning.job import Clock
from autockpt.tuning.remedies import Bench, explained
from autockpt.tuning.scoring import Simulated
from autockpt.tuning.stages import (
    allowed,
    blocks_of,
    enter_run,
    find_plan,
    foresee_plan,
    job_of,
    kept,
    uniform_plans,
)

CANDIDATES = 1
"""Plans of the solver that are refined where ghost runs of the whole model are dear. In a simulation prices are what
the solver takes them for, so its plan is what any other candidate would come to."""


def simulate_search(request: SearchRequest, hardware: Hardware, clock: Clock) -> SearchOutcome:
    """Search for ``hardware`` by simulation alone: no weights, no step, and a plan that says so.

    Bytes are by ghost run, seconds by roofline. Writes the run's directory and plan. Raises what ``run_search`` does.
    """
    with ExitStack() as stack:
        stack.enter_context(uncollected())
        with clock.stage("trace"):
            tracer = stack.enter_context(tracer_for(hardware, request.workload))
            traced = _traced(stack, request, tracer, hardware)
        budget, capped = within(request.budget, hardware)
        stack.enter_context(_naming_ways_out(request, traced, hardware, clock))
        settled = Settled({}, tracer, traced.uniform, budget, twin=traced.twin)
        if traced.space.head or request.allow_inexact:
            with clock.stage("weigh the output head"):
                settled = settle(
                    settled,
                    tracer.head,
                    traced.space,
                    times=lambda uniform: modelled(hardware, uniform),
                    room=lambda: hardware.memory_bytes,
                    profiled=partial(_profiled, settled, hardware, request.host_budget),
                    inexact=request.allow_inexact,
                    needs=promised_bytes(hardware, budget.size),
                )
        job = job_of(request, tracer, settled, traced.space, (*traced.notes, *capped, said_of(hardware)))
        job = replace(job, settings={**job.settings, "device": f"{hardware.name}, simulated"})
        units = units_of(tracer.units, tracer.head, settled.fixed)
        with clock.stage("profile"):
            profiled = _profiled(settled, hardware, request.host_budget)
        environment = profiled.profile.op_times.environment
        if request.dry_run:
            return kept(request, foresee_plan(job, units, profiled, clock, seconds=True))
        run = enter_run(stack, request, job, environment, tracer.units, settled, device=hardware.name)
        storage, calls = request.storage or run.storage, calls_per_candidate(profiled.base)
        scorer = Simulated() if traced.twin is None else Simulated(most_candidates=CANDIDATES)
        return kept(request, find_plan(job, units, profiled, scorer, run, storage, clock, referee_calls=calls))


@dataclass(frozen=True)
class _Traced:
    """Ghost runs of the uniform plans, of the whole model or, with ``twin``, of a shallow one beside the plain step."""

    tracer: Tracer
    uniform: Uniform
    space: SearchSpace
    notes: tuple[str, ...]
    twin: tuple[Traces, Uniform] | None = None


def _traced(stack: ExitStack, request: SearchRequest, tracer: Tracer, hardware: Hardware) -> _Traced:
    blocks = blocks_of(tracer)
    space, notes = without_offload(request.space, hardware)
    if len(blocks) >= DEEP:
        plain = uniform_graphs(tracer, blocks, (SAVE.kind,))
        base = plain[SAVE.kind][1]
        twin = twin_uniform(stack, request.workload, tracer, base, space, hardware)
        if twin is not None:
            space, refused = allowed(space, twin[1])
            return _Traced(tracer, plain, space, (*notes, *refused), twin)
    uniform, space, refused = uniform_plans(tracer, space)
    return _Traced(tracer, uniform, space, (*notes, *refused))


def without_offload(space: SearchSpace, hardware: Hardware) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without choices that move bytes where that frees none, and a note on it."""
    moving = [kind for kind in space.choices if "offload" in kind]
    if not hardware.unified_memory or not moving:
        return space, ()
    rest = tuple(kind for kind in space.choices if kind not in moving)
    note = f"not on {hardware.name}: {', '.join(moving)} (host and device share their memory)"
    return space.restricted((*rest, *space.head)), (note,)


def _profiled(settled: Settled, hardware: Hardware, host_budget: int | None) -> Profiled:
    needs = promised_bytes(hardware, settled.budget.size)
    if settled.twin is None:
        times = modelled(hardware, {**settled.uniform, **settled.plain})
        return build_profile(
            settled.traces, times, settled.uniform, host_budget=host_budget, needs=needs, fixed=settled.fixed
        )
    twin, uniform = settled.twin
    times = modelled(hardware, {**uniform, **settled.plain, "whole": settled.uniform[SAVE.kind]})
    small = build_profile(twin, times, uniform, host_budget=host_budget, fixed=settled.fixed)
    return transplanted(small, settled.uniform[SAVE.kind][1], settled.traces.trace, needs)


@contextmanager
def _naming_ways_out(request: SearchRequest, traced: _Traced, hardware: Hardware, clock: Clock) -> Iterator[None]:
    """A budget that nothing fits is said with changes of the job that would fit."""
    try:
        yield
    except InfeasibleError as error:
        budget = min(request.budget.size or hardware.memory_bytes, hardware.memory_bytes)
        kinds = tuple(traced.space.choices)
        device = torch_device(hardware)
        bench = Bench(budget, device, lambda runs: modelled(hardware, runs), kinds, hardware=hardware)
        uniform = traced.uniform
        if traced.twin is not None:
            blocks = blocks_of(traced.tracer)
            uniform = uniform_graphs(traced.tracer, blocks, [k for k in ("recompute", "save") if k in kinds])
        raise explained(error, request, traced.tracer.settings, uniform, bench, clock) from None


def modelled(hardware: Hardware, uniform: Uniform) -> OpTimes:
    """Op times of the hardware for all that the ghost runs of the uniform plans execute."""
    graphs: list[Graph] = [graph for _, graph in uniform.values()]
    times = roofline_times(hardware, graphs)
    versions = installed_versions() | times.environment.versions
    return times.model_copy(update={"environment": times.environment.model_copy(update={"versions": versions})})


def within(budget: Budget, hardware: Hardware) -> tuple[Budget, tuple[str, ...]]:
    """The budget, at most what the hardware has (its context is part of every peak), and a note where that is less."""
    most = hardware.memory_bytes
    if budget.kind != "bytes" or (budget.size or 0) <= most:
        return budget, ()
    note = f"{hardware.name} has {format_bytes(most)}, less than the budget: planned for what it has"
    return budget.model_copy(update={"size": most}), (note,)
