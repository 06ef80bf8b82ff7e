"""The simulated step beside what a failed run reported: does it run over, where, and on which tensor."""

from __future__ import annotations

from collections.abc import Iterator

from autockpt.diagnose.frames import STAGES
from autockpt.explaining.holdings import LOGITS, StepBytes
from autockpt.profiling import simulated_memory
from autockpt.schema import Graph, Hardware, format_binary
from autockpt.schema.diagnosis import Agreement, DeviceFailure, Room, Stage, Tensor
from autockpt.schema.explanation import Holding

_SMALLEST_TOLD = 20 << 20  # bytes; the allocator asks for 2 or 20 MiB whatever smaller tensors need
_ROUNDED_TO = 2 << 20  # and for multiples of this above 10 MiB
_TENSORS = 3
_TOLERANCE = 0.05  # share by which the allocator's rounding and a stack's reading may be off
_IN_ORDER = ("forward", "loss", "backward")
_ALIKE = {"recompute": "backward"}


def compare(
    graph: Graph,
    head: str | None,
    hardware: Hardware,
    room: Room,
    failure: DeviceFailure,
) -> tuple[Agreement, tuple[Holding, ...]]:
    """How a traced step, as the device sees it, agrees with the failure; and what it holds where it runs over.

    Holdings are those at the peak where it does not. Bytes include the context.
    """
    held = StepBytes(graph, head, room.overhead)
    line = [size + room.overhead for size in graph.timeline()]
    peak = max(line, default=graph.resident_bytes + room.overhead)
    over = next((i for i, size in enumerate(line) if size > room.budget), None)
    at = over if over is not None else max(range(len(line)), key=line.__getitem__, default=0)
    promised = simulated_memory(hardware, room.budget)(graph)
    overflows = over is not None or promised > room.budget
    tried = failure.tried
    agreement = Agreement(
        simulated_peak=peak,
        simulated_reserved=promised,
        overflows=overflows,
        stage=_stage(graph, held, over) if over is not None else None,
        place=graph.ops[over].module if over is not None else "",
        asked=tuple(_of_size(graph, tried)) if tried else (),
    )
    verdicts = tuple(_verdicts(agreement, room, failure.place.stage, tried))
    return agreement.model_copy(update={"verdicts": verdicts}), held.holdings(at)


def _stage(graph: Graph, held: StepBytes, at: int) -> Stage:
    op = graph.ops[at]
    if op.phase != "optimizer" and any(held.purposes.get(out.storage) == LOGITS for out in op.outputs):
        return "loss"
    return op.phase


def _of_size(graph: Graph, tried: int) -> Iterator[Tensor]:
    """Tensors of the step whose allocation the message may have been about: it rounds, to two decimals of its unit."""
    if tried <= _SMALLEST_TOLD:
        return
    unit = 1 << 30 if tried >= 1 << 30 else 1 << 20
    born = {s.id: (s.bytes, s.birth) for s in graph.storages}
    seen: set[tuple[object, ...]] = set()
    for op in graph.ops:
        for out in op.outputs:
            size, birth = born.get(out.storage, (0, -1))
            rounded = -(-size // _ROUNDED_TO) * _ROUNDED_TO
            key = (op.target, tuple(out.shape), out.dtype, op.module.rsplit(".", 1)[-1])
            # births elsewhere are of what an op only changes, or sees through a view
            if abs(rounded - tried) > 0.006 * unit or key in seen or birth != op.index:
                continue
            seen.add(key)
            yield Tensor(made_by=op.target, where=op.module, shape=tuple(out.shape), dtype=str(out.dtype), bytes=size)
            if len(seen) == _TENSORS:
                return


def _verdicts(said: Agreement, room: Room, reported: Stage, tried: int | None) -> Iterator[str]:
    needs, has = format_binary(said.simulated_peak), format_binary(room.budget)
    reserved = format_binary(said.simulated_reserved or 0)
    if not said.overflows:
        yield (
            f"The simulated step needs {needs} of the {has} that there are, so by itself it fits. What ran was "
            "something else: a longer sequence or larger batch, evaluation, tensors kept from step to step (a loss "
            "that is added up without .item()), or memory that others hold on the device."
        )
    elif said.stage is None:
        yield (
            f"The simulated step's tensors need {needs} of {has}, but its allocations come in such an order that the "
            f"allocator would reserve {reserved}, with a margin for safety: fragmentation is part of this failure."
        )
    else:
        missing = format_binary(said.simulated_peak - room.budget)
        yield (
            f"The simulated step needs {needs} for tensors and context, {missing} more than the {has} that there are: "
            f"it had to fail. An allocator would reserve {reserved}, fragmentation and a margin for safety included."
        )
    if said.stage is not None and reported != "unknown":
        where = f" ({said.place})" if said.place else ""
        verdict = _compared(said.stage, reported)
        yield f"It runs over {STAGES[said.stage]}{where}; the run failed {STAGES[reported]}. {verdict}"
    if tried is None or tried <= _SMALLEST_TOLD:
        return
    if said.asked:
        names = "; ".join(_tensor_words(t) for t in said.asked)
        yield f"The allocation that failed, {format_binary(tried)}, has the size of {names}."
    else:
        yield (
            f"No tensor of the simulated step has the {format_binary(tried)} of the allocation that failed: batch "
            "size, sequence length or attention may have been others in the run."
        )


def _compared(simulated: Stage, reported: Stage) -> str:
    if _ALIKE.get(simulated, simulated) == _ALIKE.get(reported, reported):
        return "They agree."
    if reported == "optimizer":
        return "In its first step a run has no optimizer states yet, comes further, and fails when they are made."
    if not {simulated, reported} <= {*_IN_ORDER}:
        return "They do not agree."
    if _IN_ORDER.index(reported) > _IN_ORDER.index(simulated):
        return (
            "The run came further: a first step has no optimizer states yet, batches may be smaller, or the run "
            "recomputes layers that the simulated step keeps (TRL does by default)."
        )
    return "The run failed earlier: its batches may be larger, or others hold memory on the device."


def _tensor_words(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape))
    where = f" in {tensor.where}" if tensor.where else ""
    return f"{shape} {tensor.dtype} ({tensor.made_by}{where})"
