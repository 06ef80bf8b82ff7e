"""From the evidence and the job to the whole Diagnosis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autockpt.diagnose.advice import advice_of, verdict_of
from autockpt.diagnose.question import DiagnoseRequest
from autockpt.errors import TracingError, WorkloadError
from autockpt.schema import Listener, Silence, WorkloadSpec
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
        "advice": advice_of(question.log, question.snapshot),
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
    """Fields of the Diagnosis that ghost runs fill."""
    from autockpt.diagnose.agreement import compare
    from autockpt.diagnose.prescribe import as_run, prescribe
    from autockpt.diagnose.room import room_of
    from autockpt.profiling import tracer_for
    from autockpt.tuning.outcome import plain
    from autockpt.tuning.question import Clock

    room, hardware, doubts = room_of(question)
    clock = Clock(listener)
    recompute = question.command is not None and question.command.recompute
    with clock.stage("trace"), tracer_for(hardware, spec) as tracer:
        units, head = tracer.units, tracer.head
        graph = tracer.trace(as_run(units, recompute=recompute))
        settings = {k: v for k, v in plain(tracer.settings).items() if k != "model"}
        notes = (*tracer.notes, *graph.notes)
    name = head.name if head is not None else None
    agreement, holdings = compare(graph, name, hardware, room, question.failure, question.snapshot)
    given = prescribe(question, spec, hardware, room, clock)
    outcome = given.outcome
    plan = outcome.plan if outcome is not None else None
    return {
        "settings": settings,
        "room": room,
        "holdings": holdings,
        "agreement": agreement,
        "rows": outcome.rows if outcome is not None else (),
        "choices": plan.choices_for(units, head) if plan is not None else {},
        "plan_path": outcome.plan_path if outcome is not None else None,
        "fits_already": outcome is not None and not outcome.binding,
        "smallest_peak": given.smallest_peak,
        "alternatives": given.alternatives,
        "notes": tuple(dict.fromkeys((*doubts, *(outcome.notes if outcome is not None else notes)))),
    }


def _notes(question: DiagnoseRequest) -> Iterator[str]:
    for reading in (question.log, question.snapshot, question.command):
        if reading is not None:
            yield from reading.notes
    if question.spec is None:
        yield "no model was named, so nothing is prescribed: add --model, and --batch-size, --seq-len, … or --run"
