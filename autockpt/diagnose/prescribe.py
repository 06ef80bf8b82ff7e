"""The way out of an OOM: a plan for the very device that failed; or, where none fits, changes of the job that would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autockpt.diagnose.question import Question
from autockpt.errors import InfeasibleError
from autockpt.profiling import build_profile, device_peak, uniform_graphs
from autockpt.profiling.seen import DeviceTraces
from autockpt.schema import Budget, Choice, SearchOutcome, SearchRequest, WorkloadSpec, load_space, parse_choice
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
TRIES = 3


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
    target, reserved = room.budget, None
    for _ in range(TRIES):
        budget = Budget(text=f"{target // 2**20 / 1024:.2f}GiB", kind="bytes", size=target)
        job = job_of(request, tracer, Settled({}, traces, uniform, budget), space, notes)  # type: ignore[arg-type]
        job = replace(job, settings={**job.settings, "device": f"{hardware.name}, simulated"})
        try:
            outcome = foresee_plan(job, tracer.units, profiled, clock, seconds=True)
        except InfeasibleError as error:
            device, kinds = torch_device(hardware), space.choices
            bench = Bench(room.budget, device, lambda runs: modelled(hardware, runs), kinds, hardware=hardware)
            with clock.stage("look for ways out"):
                ways = ways_out(spec, tracer.settings, uniform, bench)
            return Prescription(ways=ways, smallest_peak=error.smallest_peak, notes=notes)
        assert outcome.plan is not None
        graph = traces.trace(outcome.plan.choices_for(tracer.units, tracer.head))
        modelled_peak = device_peak(hardware, graph, limit=room.budget)
        reserved = modelled_peak.total
        if modelled_peak.fits:
            break
        target -= max(reserved - room.budget, 64 << 20)
    return Prescription(kept(request, outcome), (), outcome.smallest_peak, reserved, notes)


def _request(question: Question, spec: WorkloadSpec, hardware: Hardware, room: Room) -> SearchRequest:
    return SearchRequest(
        budget=Budget(text=f"{room.budget // 2**20 / 1024:.2f}GiB", kind="bytes", size=room.budget),
        workload=spec,
        space=load_space(SPACE),
        hardware=hardware,
        plan_out=question.plan_out,
        dry_run=True,
    )


def as_run(tracer: Tracer, recompute: bool) -> Mapping[str, Choice]:
    """The choices that the failed run had: none, or every block recomputed."""
    return {u.name: parse_choice("recompute") for u in tracer.units if recompute and u.role == "block"}
