"""The way out of an OOM: a plan for the very device that failed; or, where none fits, changes of the job that would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autockpt.diagnose.question import Question
from autockpt.errors import InfeasibleError
from autockpt.profiling import build_profile, device_peak, uniform_graphs
from autockpt.profiling.seen import DeviceTraces
from autockpt.schema import (
    Budget,
    Choice,
    DevicePeak,
    SearchOutcome,
    SearchRequest,
    WorkloadSpec,
    load_space,
    parse_choice,
)
from autockpt.schema.diagnosis import Room
from autockpt.schema.hardware import Hardware
from autockpt.schema.remedy import WayOut
from autockpt.tracing import Tracer
from autockpt.tuning.inexact import Settled
from autockpt.tuning.job import Clock
from autockpt.tuning.remedies import Bench, ways_out
from autockpt.tuning.simulated import modelled, torch_device
from autockpt.tuning.stages import allowed, blocks_of, foresee_plan, job_of, kept

SPACE = "knobs"
TRIES = 4
LEAST_STEP = 64 << 20  # bytes
_LESS = "made for less than the {asked} that there are, because the allocator would fragment them"


@dataclass(frozen=True)
class Prescription:
    """What helps: an outcome with a plan, or the ways out, and what the allocator would reserve under the plan."""

    outcome: SearchOutcome | None = None
    ways: tuple[WayOut, ...] = ()
    smallest_peak: int | None = None
    reserved: int | None = None
    notes: tuple[str, ...] = ()


def prescribe(
    question: Question, spec: WorkloadSpec, tracer: Tracer, hardware: Hardware, room: Room, clock: Clock
) -> Prescription:
    """The plan for a room, all by ghost runs and modelled seconds, saved where the question wants it.

    A plan is held against the allocator's model, too: where it would reserve more than there is, the next is made for
    that much less. Raises UsageError for a model without blocks, PlanError where the plan cannot be written.
    """
    traces = DeviceTraces(tracer, hardware, spec)
    blocks = blocks_of(tracer)
    with clock.stage("weigh choices"):
        wanted = load_space(SPACE)
        uniform = uniform_graphs(traces, blocks, wanted.choices)
        space, notes = allowed(wanted, uniform)
        profiled = build_profile(traces, modelled(hardware, uniform), uniform)
    request = _request(question, spec, hardware, room)
    target, smallest = room.budget, None
    found: tuple[SearchOutcome, DevicePeak] | None = None
    for _ in range(TRIES):
        budget = Budget(text=_said(target), kind="bytes", size=target)
        remarks = notes if target == room.budget else (*notes, _LESS.format(asked=_said(room.budget)))
        job = job_of(request, tracer, Settled({}, traces, uniform, budget), space, remarks)  # type: ignore[arg-type]
        job = replace(job, settings={**job.settings, "device": f"{hardware.name}, simulated"})
        try:
            outcome = foresee_plan(job, tracer.units, profiled, clock, seconds=True)
        except InfeasibleError as error:
            smallest = error.smallest_peak
            break
        assert outcome.plan is not None
        graph = traces.trace(outcome.plan.choices_for(tracer.units, tracer.head))
        peak = device_peak(hardware, graph, limit=room.budget)
        found, smallest = (outcome, peak), outcome.smallest_peak
        less = max(target - max(peak.total - room.budget, LEAST_STEP), smallest or 0)
        if peak.fits or less >= target:
            break
        target = less
    ways: tuple[WayOut, ...] = ()
    if found is None or not found[1].fits:
        device, kinds = torch_device(hardware), space.choices
        bench = Bench(room.budget, device, lambda runs: modelled(hardware, runs), kinds, hardware=hardware)
        with clock.stage("look for ways out"):
            ways = ways_out(spec, tracer.settings, uniform, bench)
    if found is None:
        return Prescription(ways=ways, smallest_peak=smallest, notes=notes)
    return Prescription(kept(request, found[0]), ways, smallest, found[1].total, notes)


def _said(size: int) -> str:
    return f"{size // 2**20}MiB"


def _request(question: Question, spec: WorkloadSpec, hardware: Hardware, room: Room) -> SearchRequest:
    return SearchRequest(
        budget=Budget(text=_said(room.budget), kind="bytes", size=room.budget),
        workload=spec,
        space=load_space(SPACE),
        hardware=hardware,
        plan_out=question.plan_out,
        dry_run=True,
    )


def as_run(tracer: Tracer, recompute: bool) -> Mapping[str, Choice]:
    """The choices that the failed run had: none, or every block recomputed."""
    return {u.name: parse_choice("recompute") for u in tracer.units if recompute and u.role == "block"}
