"""What ``autockpt diagnose`` is asked, and from the log and the job to the whole Diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.diagnose.advice import advice_of, verdict_of
from autockpt.errors import InfeasibleError, TracingError, UsageError, WorkloadError
from autockpt.schema import Budget, Listener, SearchRequest, Silence, WorkloadSpec, format_binary
from autockpt.schema.diagnosis import (
    Backend,
    DeviceFailure,
    Diagnosis,
    LogReading,
    Room,
)
from autockpt.schema.hardware import Hardware, HardwareKind
from autockpt.tracing import tracer_for
from search_spaces.hardware import list_hardware, load_hardware


@dataclass(frozen=True)
class DiagnoseRequest:
    """The log, already read, and the job that failed.

    Without ``spec`` only what the log says is told. ``budget`` is of kind bytes or auto; None: what the device has.
    """

    log: LogReading
    spec: WorkloadSpec | None = None
    budget: Budget | None = None
    hardware: Hardware | None = None
    plan_out: Path | None = None

    @property
    def failure(self) -> DeviceFailure | None:
        """The first failure of a device that the log tells of."""
        return self.log.failures[0] if self.log.failures else None


def diagnose(question: DiagnoseRequest, listener: Listener | None = None) -> Diagnosis:
    """What happened, what filled the device, and what helps; no step is run.

    A job for which no plan fits is no error: ``ways`` say what would fit. Raises UsageError where nothing says how much
    memory the device has. A model that cannot be built or traced is named in ``unprescribed``.
    """
    told: dict[str, Any] = {
        "log": question.log,
        "verdict": verdict_of(question.log),
        "advice": tuple(advice_of(question.log)),
        "notes": tuple(_notes(question)),
    }
    if question.spec is None or question.failure is None:
        return Diagnosis(model=question.spec.model if question.spec else None, **told)
    try:
        found = _simulated(question, question.spec, question.failure, listener or Silence())
    except (WorkloadError, TracingError) as error:
        return Diagnosis(model=question.spec.model, unprescribed=str(error), **told)
    notes = (*told.pop("notes"), *found.pop("notes"))
    return Diagnosis(model=question.spec.model, notes=notes, **told, **found)


def _simulated(
    question: DiagnoseRequest, spec: WorkloadSpec, failure: DeviceFailure, listener: Listener
) -> dict[str, Any]:
    """Fields of the Diagnosis that ghost runs and modelled seconds fill: what fills the device, and what helps.

    That is a plan, saved where the question wants it; where none fits, changes of the job that would. Peaks are what
    the allocator is simulated to reserve. Raises UsageError for a model without blocks, PlanError where the plan cannot
    be written.
    """
    from autockpt.diagnose.agreement import compare
    from autockpt.tuning import run_search
    from autockpt.tuning.outcome import plain
    from search_spaces.spaces import load_space

    room, hardware, doubts = room_of(question)
    listener.stage("trace")
    with tracer_for(hardware, spec) as tracer:
        units, head = tracer.units, tracer.head
        graph = tracer.trace({})
        settings = {k: v for k, v in plain(tracer.settings).items() if k != "model"}
        doubts = (*doubts, *_other_parameters(question.log, settings))
        notes = (*tracer.notes, *graph.notes)
    name = head.name if head is not None else None
    agreement, holdings = compare(graph, name, hardware, room, failure)
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
        outcome = run_search(request, listener)
    except InfeasibleError as error:
        found |= {"smallest_peak": error.smallest_peak, "alternatives": error.alternatives}
    else:
        notes, plan = outcome.notes, outcome.plan
        found |= {
            "rows": outcome.rows,
            "choices": plan.choices_for(units, head) if plan is not None else {},
            "plan_path": outcome.plan_path,
            "step_note": outcome.step_note,
            "fits_already": not outcome.binding,
            "smallest_peak": outcome.smallest_peak,
        }
    return found | {"notes": tuple(dict.fromkeys((*doubts, *notes)))}


def _notes(question: DiagnoseRequest) -> Iterator[str]:
    yield from question.log.notes
    log, spec = question.log, question.spec
    if spec is not None and log.world is not None and log.world > 1 and spec.shard is None and spec.ddp is None:
        stage = f", with ZeRO stage {log.zero_stage}" if log.zero_stage else ""
        sharded = f"--shard {log.world}" + ("" if log.zero_stage == 3 else " (FSDP, ZeRO-3) or --ddp buckets")
        yield f"the run had {log.world} ranks{stage}, the job that was described has one: add {sharded}"
    if spec is None:
        total, trained = log.total_params, log.trainable_params
        counts = (f"{total:,} parameters" if total else "", f"{trained:,} that train" if trained else "")
        if known := ", ".join(filter(None, counts)):
            yield f"the run had {known}"
        yield "no model was named, so nothing is prescribed: add --model, and --batch-size, --seq-len, …"


_OTHER = 0.05  # share by which counts of parameters may differ: prompts, resized embeddings


def _other_parameters(log: LogReading, settings: Mapping[str, Any]) -> Iterator[str]:
    """Where the log counts other parameters than the job has that was described."""
    for logged, name, words, remedy in (
        (log.total_params, "params", "parameters", "name the model that ran"),
        (log.trainable_params, "trainable_params", "parameters that train", "describe its adapters (--lora RANK, …)"),
    ):
        described = settings.get(name)
        if logged and described and abs(described / logged - 1) > _OTHER:
            yield f"the run had {logged:,} {words}, the job that was described has {described:,}: {remedy}"


_KINDS: dict[Backend, HardwareKind] = {"hip": "rocm", "mps": "mps"}  # all others: cuda
_UNDESCRIBED: dict[Backend, str] = {"xpu": "Intel GPU", "npu": "NPU", "hpu": "Gaudi", "other": "such device"}
_LEAST_CONTEXT = 100 << 20  # bytes; a process without one is not on the device yet
_FAR = 0.2  # share by which the nearest description's memory may differ before that is worth saying


def room_of(question: DiagnoseRequest) -> tuple[Room, Hardware, tuple[str, ...]]:
    """What a plan may use, the device with the figures that were reported, and remarks.

    Raises UsageError where neither the log nor options say what the device has.
    """
    failure = question.failure
    if failure is not None and failure.capacity is not None:
        return _of_failure(question, failure, failure.capacity)
    if question.hardware is None:
        if question.budget is None or question.budget.size is None:
            raise UsageError(
                "how much memory the device has is not known: nothing that was given says so",
                remedy="Add --hardware with its name (rtx4090, h100, …), or --budget with its size (24GiB).",
            )
        hardware, notes = _nearest(question.budget.size, "cuda")
        given = hardware.model_copy(update={"memory_bytes": question.budget.size})
        return _room(question, given, 0, f"--budget {question.budget}"), given, notes
    return _room(question, question.hardware, 0, f"as {question.hardware.name} is described"), question.hardware, ()


def _of_failure(
    question: DiagnoseRequest, failure: DeviceFailure, capacity: int
) -> tuple[Room, Hardware, tuple[str, ...]]:
    if failure.allowed is not None:
        capacity = min(capacity, failure.allowed + (failure.overhead or 0))
    hardware, notes = _device(question, capacity, _KINDS.get(failure.backend, "cuda"))
    overhead = min(hardware.context_bytes, capacity // 2)
    if failure.overhead is not None and failure.overhead >= _LEAST_CONTEXT:
        overhead = min(failure.overhead, capacity - 1)
    hardware = hardware.model_copy(update={"memory_bytes": capacity, "context_bytes": overhead})
    if (name := _UNDESCRIBED.get(failure.backend)) is not None:
        notes = (*notes, f"no {name} is described: its kernels and seconds are taken to be those of an NVIDIA GPU")
    said = "capacity and other processes as the message has them"
    return _room(question, hardware, failure.others or 0, said), hardware, notes


def _room(question: DiagnoseRequest, hardware: Hardware, others: int, said: str) -> Room:
    available = hardware.memory_bytes - others
    asked = question.budget.size if question.budget is not None else None
    if asked is not None and asked < available:
        available, said = asked, f"{said}; --budget {question.budget}"
    if available <= hardware.context_bytes:
        raise UsageError(
            f"other processes hold {format_binary(others)} of the device's {format_binary(hardware.memory_bytes)}: "
            "nothing is left for this one",
            remedy="End them, or name the room that there will be with --budget.",
        )
    return Room(
        budget=available,
        hardware=hardware.name,
        capacity=hardware.memory_bytes,
        overhead=hardware.context_bytes,
        others=others,
        said=said,
    )


def _device(question: DiagnoseRequest, capacity: int, kind: HardwareKind) -> tuple[Hardware, tuple[str, ...]]:
    if question.hardware is None:
        return _nearest(capacity, kind)
    has = question.hardware.memory_bytes
    if abs(has / capacity - 1) > _FAR:
        note = f"{question.hardware.name} has {format_binary(has)}, the failed run's device {format_binary(capacity)}"
        return question.hardware, (f"{note}: kernels and seconds are the former's, memory the latter's",)
    return question.hardware, ()


def _nearest(capacity: int, kind: HardwareKind) -> tuple[Hardware, tuple[str, ...]]:
    """The described device whose memory comes nearest, and that this is a guess."""
    known = [h for name in list_hardware() if (h := load_hardware(name)).kind == kind]
    least = min(abs(h.memory_bytes - capacity) for h in known)
    near = [h for h in known if abs(h.memory_bytes - capacity) == least]
    found = max(near, key=lambda h: (h.capability or (), h.bandwidth))  # of several the newest
    note = "which device it was is not known: kernels and seconds are those of"
    why = "whose memory comes nearest"
    if others := [h.name for h in near if h is not found]:
        why = f"the newest of those whose memory comes nearest (as near: {', '.join(others)})"
    return found, (f"{note} {found.name}, {why}; --hardware NAME names yours",)
