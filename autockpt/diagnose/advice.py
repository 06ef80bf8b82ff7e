"""What the log alone says: what happened, in a sentence, and what helps whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator

from autockpt.diagnose.frames import STAGES
from autockpt.diagnose.host import ADVICE
from autockpt.schema import format_binary
from autockpt.schema.diagnosis import Backend, DeviceFailure, HostKind, LogReading, Place, Stage

_HOST: dict[HostKind, str] = {
    "killed": "The operating system killed the process for want of the host's memory: no device ran out",
    "worker": "A DataLoader worker was killed for want of the host's memory: no device ran out",
    "allocator": "The host's memory could not hold a tensor on the CPU: no device ran out",
    "shared_memory": "The host's shared memory ran out: no device did",
}
_BY_STAGE: dict[Stage, str] = {
    "evaluation": "It failed in evaluation, which keeps nothing for a backward pass: plans do not lower it. Use "
    "a smaller per_device_eval_batch_size, eval_accumulation_steps, and prediction_loss_only where logits are not "
    "needed.",
    "loading": "It failed while the model was loaded, before any step: weights in a smaller type (bf16), sharding, or "
    "LoRA on quantised weights help there, plans for activations do not.",
}
_FRAGMENTED = 0.1  # share of reserved memory that lies unused, from which on it is worth a try
_UNUSED = 0.02  # share below which what lies unused is what any run leaves
_EXPANDABLE: dict[Backend, str] = {
    "cuda": "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9 PYTORCH_CUDA_ALLOC_CONF)",
    "hip": "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True, where the build supports it",
    "xpu": "PYTORCH_ALLOC_CONF=expandable_segments:True (from torch 2.10 on)",
    "npu": "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
}


def verdict_of(log: LogReading) -> str:
    """What happened, in a sentence."""
    if log.failures:
        return _of_failure(log.failures[0], log.world)
    if log.host is not None:
        tried = f" ({format_binary(log.host.tried)} were asked for)" if log.host.tried is not None else ""
        return f"{_HOST[log.host.kind]}{tried}."
    return ""


def _of_failure(failure: DeviceFailure, world: int | None) -> str:
    name = failure.backend.upper() if failure.backend in ("npu", "hpu") else "GPU"
    who = f"{name} {failure.device}" if failure.device is not None else "The device"
    who = "The Mac's GPU" if failure.backend == "mps" else who
    of = f" of {world}" if world is not None and failure.rank is not None and failure.rank < world else ""
    rank = f" (rank {failure.rank}{of})" if failure.rank is not None else ""
    said = f"{who}{rank} ran out of memory {_where(failure.place)}"
    if failure.tried is None:
        return f"{said}; the message has no figures."
    said += f": {format_binary(failure.tried)} were asked for"
    if failure.free is not None and failure.capacity is not None:
        said += f", {format_binary(failure.free)} of {format_binary(failure.capacity)} were free"
    return f"{said}."


def _where(place: Place) -> str:
    calls = f", in {' > '.join(place.calls[-4:])}" if place.calls else ""
    frame = place.model or place.user
    at = f" ({frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line})" if frame is not None else ""
    return f"{STAGES[place.stage]}{calls}{at}"


_SHOWN_BY: dict[Backend, str] = {
    "cuda": "nvidia-smi",
    "hip": "rocm-smi",
    "xpu": "xpu-smi",
    "npu": "npu-smi",
    "hpu": "hl-smi",
    "mps": "the Activity Monitor",
    "other": "its driver's tool",
}


def advice_of(log: LogReading) -> Iterator[str]:
    """What helps, by the log alone."""
    if log.host is not None:
        yield from ADVICE[log.host.kind]
    if not log.failures:
        return
    failure = log.failures[0]
    if log.can_expand:
        yield from _of_fragments(failure)
    if failure.allocated is not None and failure.capacity and failure.allocated > failure.capacity:
        yield (
            f"PyTorch holds {format_binary(failure.allocated)}, more than the device has: its driver moved the rest to "
            "the host's memory, where steps are many times slower. Plan for what the device has."
        )
    if failure.others is not None and failure.capacity and failure.others > 0.02 * failure.capacity:
        shown = f"{_SHOWN_BY[failure.backend]} shows them"
        most = "at most " if failure.process is None else ""
        yield (
            f"Others hold {most}{format_binary(failure.others)} of the device: other processes ({shown}, an earlier "
            "run may still live), or a desktop. End them, and the budget grows by that."
        )
    yield from filter(None, [_BY_STAGE.get(failure.place.stage)])


def _of_fragments(failure: DeviceFailure) -> Iterator[str]:
    """Expandable segments, where what lies unused would have done; only PyTorch's own allocator reports that."""
    reserved, unused, tried = failure.reserved, failure.cached, failure.tried
    if not reserved or not unused or failure.backend not in _EXPANDABLE:
        return
    if unused <= (_FRAGMENTED if tried is None else _UNUSED) * reserved:
        return
    if tried is not None and unused + (failure.free or 0) < tried:
        return
    said = f"{format_binary(unused)} were reserved and unused, in pieces"
    if tried is not None:
        said = f"Fragmentation: {said}; with what was free that is more than the {format_binary(tried)} asked for"
    yield (
        f"{said}. Let segments grow, so that free blocks come together: {_EXPANDABLE[failure.backend]}. It costs "
        "nothing; try it first."
    )
