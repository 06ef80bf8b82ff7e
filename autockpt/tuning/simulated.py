"""Searching for hardware that is not at hand: ghost runs and modelled op times in place of real steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from autockpt.errors import AutockptError, InfeasibleError
from autockpt.measuring.environment import installed_versions
from autockpt.profiling import (
    Profiled,
    build_profile,
    promised_bytes,
    said_of,
    torch_device,
    tracer_for,
    uniform_graphs,
)
from autockpt.profiling.roofline import roofline_times
from autockpt.schema import Budget, Graph, OpTimes, SearchOutcome, SearchRequest, SearchSpace, format_bytes
from autockpt.schema.hardware import Hardware
from autockpt.tracing import Tracer
from autockpt.tracing.tracer import uncollected
from autockpt.tuning.depth import DEEP, calls_per_candidate, open_twin, transplanted
from autockpt.tuning.job import Clock
from autockpt.tuning.remedies import Bench, explained
from autockpt.tuning.scoring import Simulated
from autockpt.tuning.stages import (
    Traced,
    blocks_of,
    enter_run,
    find_plan,
    foresee_plan,
    job_of,
    kept,
    traced,
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
            found = _traced(stack, request, tracer, hardware)
        budget, capped = within(request.budget, hardware)
        stack.enter_context(_naming_ways_out(request, found, hardware, clock))
        job = job_of(request, found, budget, (*capped, said_of(hardware)))
        job = replace(job, settings={**job.settings, "device": f"{hardware.name}, simulated"})
        with clock.stage("profile"):
            profiled = _profiled(found, hardware, budget, request.host_budget)
        environment = profiled.profile.op_times.environment
        if request.dry_run:
            return kept(request, foresee_plan(job, tracer, profiled, clock, seconds=True))
        run = enter_run(stack, request, job, environment, tracer.units, device=hardware.name)
        storage, calls = request.storage or run.storage, calls_per_candidate(profiled.base)
        scorer = Simulated() if found.twin is None else Simulated(most_candidates=CANDIDATES)
        return kept(request, find_plan(job, tracer, profiled, scorer, run, storage, clock, referee_calls=calls))


def _traced(stack: ExitStack, request: SearchRequest, tracer: Tracer, hardware: Hardware) -> Traced:
    """Ghost runs of the whole model or, of a deep one, of its shallow twin."""
    blocks = blocks_of(tracer)
    space, notes = without_offload(request.space, hardware)
    if len(blocks) >= DEEP:
        base = tracer.trace()
        twin = open_twin(stack, request.workload, tracer, base, hardware)
        if twin is not None:
            try:
                found = traced(twin, space, request.allow_inexact, notes)
            except AutockptError:
                return traced(tracer, space, request.allow_inexact, notes)
            return replace(found, tracer=tracer, twin=twin, base=base)
    return traced(tracer, space, request.allow_inexact, notes)


def without_offload(space: SearchSpace, hardware: Hardware) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without choices that move bytes where that frees none, and a note on it."""
    moving = [kind for kind in space.choices if "offload" in kind]
    if not hardware.unified_memory or not moving:
        return space, ()
    rest = tuple(kind for kind in space.choices if kind not in moving)
    note = f"not on {hardware.name}: {', '.join(moving)} (host and device share their memory)"
    return space.restricted((*rest, *space.head)), (note,)


def _profiled(found: Traced, hardware: Hardware, budget: Budget, host_budget: int | None) -> Profiled:
    needs = promised_bytes(hardware, budget.size)
    graphs = [graph for _, graph in found.uniform.values()]
    times = modelled(hardware, graphs if found.base is None else [*graphs, found.base])
    if found.heads is not None:  # what regions cost that run again is read off layers
        times = times.completed(modelled(hardware, list(found.heads.graphs.values())))
    if found.twin is None or found.base is None:
        return build_profile(found.tracer, times, found.uniform, host_budget=host_budget, needs=needs, head=found.heads)
    small = build_profile(found.twin, times, found.uniform, host_budget=host_budget, head=found.heads)
    return transplanted(small, found.base, found.tracer.trace, needs)


@contextmanager
def _naming_ways_out(request: SearchRequest, found: Traced, hardware: Hardware, clock: Clock) -> Iterator[None]:
    """A budget that nothing fits is said with changes of the job that would fit."""
    try:
        yield
    except InfeasibleError as error:
        budget = min(request.budget.size or hardware.memory_bytes, hardware.memory_bytes)
        kinds = tuple(found.space.choices)
        device = torch_device(hardware)
        bench = Bench(budget, device, partial(modelled, hardware), kinds, hardware=hardware)
        uniform = found.uniform
        if found.twin is not None:
            blocks = blocks_of(found.tracer)
            uniform = uniform_graphs(found.tracer, blocks, [k for k in ("recompute", "save") if k in kinds])
        raise explained(error, request, found.tracer.settings, uniform, bench, clock) from None


def modelled(hardware: Hardware, graphs: Sequence[Graph]) -> OpTimes:
    """Op times of the hardware for all that these ghost runs execute."""
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
