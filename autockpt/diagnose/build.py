"""From the evidence and the job to the whole Diagnosis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autockpt.diagnose.advice import advice_of, verdict_of
from autockpt.diagnose.question import DiagnoseRequest
from autockpt.errors import InfeasibleError, TracingError, WorkloadError
from autockpt.schema import RECOMPUTE, Listener, SearchRequest, Silence, WorkloadSpec
from autockpt.schema.diagnosis import Diagnosis


def diagnose(question: DiagnoseRequest, listener: Listener | None = None) -> Diagnosis:
    """What happened, what filled the device, and what helps; no step is run.

    A job for which no plan fits is no error: ``ways`` say what would fit. Raises UsageError where nothing says how much
    memory the device has. A model that cannot be built or traced is an error only where there is no evidence to tell.
    """
    told: dict[str, Any] = {
        "log": question.log,
        "snapshot": question.snapshot,
        "command": question.command,
        "verdict": verdict_of(question.log, question.snapshot),
        "advice": tuple(advice_of(question.log, question.snapshot)),
        "notes": tuple(_notes(question)),
    }
    on_host = question.log is not None and not question.log.failures
    if question.spec is None or on_host:
        return Diagnosis(model=question.spec.model if question.spec else None, **told)
    try:
        found = _simulated(question, question.spec, listener or Silence())
    except (WorkloadError, TracingError) as error:
        if question.log is None and question.snapshot is None:
            raise
        return Diagnosis(model=question.spec.model, unprescribed=str(error), **told)
    notes = (*told.pop("notes"), *found.pop("notes"))
    return Diagnosis(model=question.spec.model, notes=notes, **told, **found)


def _simulated(question: DiagnoseRequest, spec: WorkloadSpec, listener: Listener) -> dict[str, Any]:
    """Fields of the Diagnosis that ghost runs and modelled seconds fill: what fills the device, and what helps.

    That is a plan, saved where the question wants it; where none fits, changes of the job that would. Peaks are what
    the allocator is simulated to reserve. Raises UsageError for a model without blocks, PlanError where the plan cannot
    be written.
    """
    from autockpt.diagnose.agreement import compare
    from autockpt.diagnose.room import room_of
    from autockpt.profiling import tracer_for
    from autockpt.tuning.outcome import plain
    from autockpt.tuning.question import Clock
    from autockpt.tuning.search import search_described
    from autockpt.tuning.stages import save_plan_copy
    from search_spaces.spaces import load_space

    room, hardware, doubts = room_of(question)
    clock = Clock(listener)
    recompute = question.command is not None and question.command.recompute
    with clock.stage("trace"), tracer_for(hardware, spec) as tracer:
        units, head = tracer.units, tracer.head
        graph = tracer.trace({u.name: RECOMPUTE for u in units if recompute and u.role == "block"})
        settings = {k: v for k, v in plain(tracer.settings).items() if k != "model"}
        notes = (*tracer.notes, *graph.notes)
    name = head.name if head is not None else None
    agreement, holdings = compare(graph, name, hardware, room, question.failure, question.snapshot)
    found: dict[str, Any] = {"settings": settings, "room": room, "holdings": holdings, "agreement": agreement}
    request = SearchRequest(
        budget=room.for_plans,
        workload=spec,
        space=load_space("knobs"),
        hardware=hardware,
        plan_out=question.plan_out,
        dry_run=True,
    )
    try:
        outcome = save_plan_copy(request, search_described(request, clock))
    except InfeasibleError as error:
        found |= {"smallest_peak": error.smallest_peak, "alternatives": error.alternatives}
    else:
        notes, plan = outcome.notes, outcome.plan
        found |= {
            "rows": outcome.rows,
            "choices": plan.choices_for(units, head) if plan is not None else {},
            "plan_path": outcome.plan_path,
            "fits_already": not outcome.binding,
            "smallest_peak": outcome.smallest_peak,
        }
    return found | {"notes": tuple(dict.fromkeys((*doubts, *notes)))}


def _notes(question: DiagnoseRequest) -> Iterator[str]:
    for reading in (question.log, question.snapshot, question.command):
        if reading is not None:
            yield from reading.notes
    if question.spec is None:
        yield "no model was named, so nothing is prescribed: add --model, and --batch-size, --seq-len, … or --run"
