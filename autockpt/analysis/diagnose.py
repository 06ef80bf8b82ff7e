"""Diagnose an out-of-memory error: what the log reports, what filled the device, and a plan that fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from autockpt.analysis.explanation import Holding
from autockpt.analysis.holdings import StepBytes
from autockpt.analysis.oom_log import DeviceFailure, LogReading, Stage
from autockpt.cost import simulated_memory
from autockpt.errors import InfeasibleError, TracingError, UsageError, WorkloadError
from autockpt.schema import (
    Budget,
    Hardware,
    Listener,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    Silence,
    WorkloadSpec,
    format_binary,
)
from autockpt.schema.base import Data
from autockpt.schema.trial import Alternative
from autockpt.shipped import list_hardware, load_hardware
from autockpt.tracing import Tracer
from autockpt.tuning import run_search
from autockpt.workload.step import DTYPES

STAGES: dict[Stage, str] = {
    "loading": "while the model was loaded",
    "batch": "while a batch was moved to the device",
    "forward": "in the forward pass",
    "loss": "at the logits and the loss",
    "backward": "in the backward pass",
    "recompute": "in the backward pass, where a layer is recomputed",
    "optimizer": "in the optimizer step",
    "evaluation": "in evaluation",
    "unknown": "at an unknown place (no usable stack trace)",
}
_STAGE_ADVICE: dict[Stage, str] = {
    "evaluation": "Evaluation keeps nothing for a backward pass, so plans do not lower it: use a smaller "
    "per_device_eval_batch_size, eval_accumulation_steps, and prediction_loss_only where logits are not needed.",
    "loading": "It failed before any step: weights in a smaller type (bf16), sharding, or LoRA on quantised weights "
    "help there, plans for activations do not.",
}
_OF_THE_HOST = (
    "Free some of the host's: fewer DataLoader workers (num_workers=2, prefetch_factor=1, pin_memory=False) and more "
    "shared memory for them (docker run --shm-size=16g), weights loaded straight to the device (device_map), "
    "--host-budget for what a plan offloads, a higher limit of the container or batch job."
)
_UNUSED = 0.02  # share of reserved memory below which what lies unused is what any run leaves
_LEAST_CONTEXT = 100 << 20  # bytes; a process without one is not on the device yet


class Diagnosis(Data):
    """The whole answer. Bytes of holdings and of the search are simulated, those of the log reported."""

    log: LogReading
    verdict: str = Field(default="", description="what happened, in a sentence")
    holdings: tuple[Holding, ...] = Field(default=(), description="of the plain step at its peak")
    agreement: str = Field(default="", description="whether the plain step had to fail, in words")
    terms: str = Field(default="", description="the memory that a plan is sought for, in words")
    outcome: SearchOutcome | None = Field(default=None, description="the suggested plan, simulated")
    refusal: str = Field(default="", description="that no plan fits, and what would")
    alternatives: tuple[Alternative, ...] = ()
    no_plan: str = Field(default="", description="why nothing could be simulated")
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def diagnose(
    log: LogReading,
    spec: WorkloadSpec | None = None,
    *,
    hardware: Hardware | None = None,
    plan_out: Path | None = None,
    listener: Listener | None = None,
) -> Diagnosis:
    """What happened, what filled the device, and what helps; no step is run.

    Without ``spec``, the job that failed, only the log is explained. A job for which no plan fits is no error:
    ``alternatives`` say what would fit. Raises UsageError where neither the log nor ``hardware`` says how much memory
    the device has. A model that cannot be built or traced is named in ``no_plan``.
    """
    found: dict[str, Any] = {}
    notes = tuple(_notes(log, spec))
    if spec is not None and log.failure is not None:
        try:
            computes_in = str(DTYPES[spec.autocast or spec.dtype or "bf16"]).removeprefix("torch.")
            budget_bytes, card, more = room_of(log.failure, hardware, computes_in)
            notes += more
            found = _suggested(spec, budget_bytes, card, log.failure.others or 0, plan_out, listener or Silence())
        except (WorkloadError, TracingError) as error:
            found = {"no_plan": str(error)}
    return Diagnosis(log=log, verdict=verdict_of(log), advice=tuple(advice_of(log)), notes=notes, **found)


def verdict_of(log: LogReading) -> str:
    """What happened, in a sentence."""
    if log.host:
        return "The host ran out of memory; no device did."
    failure = log.failure
    if failure is None:
        return ""
    who = f"GPU {failure.device}" if failure.device is not None else "The device"
    of = f" of {log.world}" if log.world is not None and log.world > (failure.rank or 0) else ""
    rank = f" (rank {failure.rank}{of})" if failure.rank is not None else ""
    text = f"{who}{rank} ran out of memory {STAGES[failure.stage]}{f' ({failure.at})' if failure.at else ''}"
    if failure.tried is None:
        return f"{text}; the message has no figures."
    text += f": {format_binary(failure.tried)} were requested"
    if failure.free is not None and failure.capacity is not None:
        text += f", {format_binary(failure.free)} of {format_binary(failure.capacity)} were free"
    return f"{text}."


def advice_of(log: LogReading) -> Iterator[str]:
    """What helps, by the log alone."""
    if log.host:
        yield f"A plan for the device does not change that: none was sought. {_OF_THE_HOST}"
    failure = log.failure
    if failure is None:
        return
    held, unused, tried = failure.allocated or 0, failure.cached or 0, failure.tried
    fits = tried is not None and unused + (failure.free or 0) >= tried and unused > _UNUSED * (held + unused)
    if fits and failure.backend != "mps":
        yield (
            f"Fragmentation: {format_binary(unused)} were reserved and unused, in pieces; with what was free that is "
            f"more than the {format_binary(tried or 0)} requested. Expandable segments join free blocks: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True. It costs nothing; try it first."
        )
    if failure.others is not None and failure.capacity and failure.others > _UNUSED * failure.capacity:
        most = "at most " if failure.process is None else ""
        yield (
            f"Others hold {most}{format_binary(failure.others)} of the device: other processes (nvidia-smi or its like "
            "shows them, an earlier run may still be alive), or a desktop. End them, and the budget grows by that."
        )
    yield from filter(None, [_STAGE_ADVICE.get(failure.stage)])


def _notes(log: LogReading, spec: WorkloadSpec | None) -> Iterator[str]:
    if len(log.ranks) > 1 and log.failure is not None:
        yield f"Ranks {', '.join(map(str, log.ranks[:16]))} ran out of memory; rank {log.failure.rank} is looked at."
    if spec is None:
        if not log.host:
            yield "No model was named, so no plan is suggested: add --model, and --batch-size, --seq-len, …"
    elif log.world is not None and log.world > 1 and spec.shard is None and spec.ddp is None:
        yield (
            f"The run had {log.world} ranks, the job that was described has one: add `shard: {log.world}` (FSDP, ZeRO) "
            "or `ddp: buckets` to a --job file."
        )


def _suggested(
    spec: WorkloadSpec, budget_bytes: int, hardware: Hardware, others: int, plan_out: Path | None, listener: Listener
) -> dict[str, Any]:
    """Fields of the Diagnosis that ghost runs and modelled seconds fill: what fills the device, and what helps."""
    listener.stage("trace")
    with Tracer.from_spec(spec, hardware=hardware) as tracer:
        head, graph = tracer.head, tracer.trace({})
    peak, room = simulated_memory(hardware, budget_bytes)(graph), format_binary(budget_bytes)
    held = StepBytes(graph, head.name if head is not None else None, hardware.context_bytes, peak)
    agreement = f"The simulated step needs {format_binary(peak)}, and there are {room}"
    if peak > budget_bytes:
        agreement += ": it had to fail."
    else:
        agreement += (
            ", so by itself it fits. The run differed: longer sequences or larger batches, evaluation, tensors kept "
            "from step to step (a loss added up without .item()), or memory that others hold on the device."
        )
    terms = f"For {room} of " if others else "For "
    terms += f"a device with {format_binary(hardware.memory_bytes)}"
    terms += f", {format_binary(others)} of which are held by others" if others else ""
    terms += f"; the context takes {format_binary(hardware.context_bytes)} of it."
    found: dict[str, Any] = {"holdings": held.holdings(), "agreement": agreement, "terms": terms}
    budget = Budget(text=f"{budget_bytes // 2**20}MiB", kind="bytes", size=budget_bytes)
    request = SearchRequest(
        budget=budget.with_headroom(None, simulated=True),  # nothing is measured, so some of it is left free
        workload=spec,
        space=SearchSpace(),
        hardware=hardware,
        plan_out=plan_out,
    )
    try:
        return found | {"outcome": run_search(request, listener)}
    except InfeasibleError as error:
        return found | {"refusal": f"{error.message}\n{error.remedy}", "alternatives": error.alternatives}


def room_of(
    failure: DeviceFailure, given: Hardware | None, computes_in: str = "float32"
) -> tuple[int, Hardware, tuple[str, ...]]:
    """The bytes that a plan may use, the device with the figures that were reported, and remarks.

    A device that neither is ``given`` nor named in the log must have a rate for the type that the job ``computes_in``.
    Raises UsageError where neither the log nor the option says what the device has.
    """
    capacity = failure.capacity or (given.memory_bytes if given is not None else None)
    if capacity is None:
        raise UsageError(
            "how much memory the device has is not known: neither the log nor an option says so",
            remedy="Add --hardware with its name (rtx4090, h100, …).",
        )
    hardware, notes = (given, ()) if given is not None else _nearest(capacity, failure.backend, computes_in)
    context = min(hardware.context_bytes, capacity // 2)
    if failure.context is not None and failure.context >= _LEAST_CONTEXT:
        context = min(failure.context, capacity - 1)
    others = failure.others or 0
    available = capacity - others
    if available <= context:
        raise UsageError(
            f"other processes hold {format_binary(others)} of the device's {format_binary(capacity)}: "
            "nothing is left for this one",
            remedy="End them, and run it again.",
        )
    return available, hardware.model_copy(update={"memory_bytes": capacity, "context_bytes": context}), notes


def _nearest(capacity: int, backend: str, computes_in: str) -> tuple[Hardware, tuple[str, ...]]:
    """The described device whose memory comes nearest, of several the newest; and that this is a guess."""
    kind = {"hip": "rocm", "mps": "mps"}.get(backend, "cuda")
    known = [h for h in map(load_hardware, list_hardware()) if h.kind == kind and computes_in in h.matrix_flops]
    found = min(known, key=lambda h: (abs(h.memory_bytes - capacity), [-x for x in h.capability or ()], -h.bandwidth))
    text = f"The log does not name the device: kernels and seconds are those of {found.name}, whose memory of "
    return found, (f"{text}{format_binary(found.memory_bytes)} is nearest; --hardware NAME names yours.",)
