"""The device that a run failed on, as its message or snapshot has it, and the memory that a plan may use there."""

from __future__ import annotations

from autockpt.diagnose.question import DiagnoseRequest
from autockpt.errors import UsageError
from autockpt.schema import format_binary
from autockpt.schema.diagnosis import Backend, DeviceFailure, Room
from autockpt.schema.hardware import Hardware, HardwareKind
from search_spaces.hardware import list_hardware, load_hardware

_KINDS: dict[Backend, HardwareKind] = {"cuda": "cuda", "hip": "rocm", "xpu": "cuda", "mps": "mps"}
_LEAST_CONTEXT = 100 << 20  # bytes; a process without one is not on the device yet
_FAR = 0.2  # share by which the nearest description's memory may differ before that is worth saying


def room_of(question: DiagnoseRequest) -> tuple[Room, Hardware, tuple[str, ...]]:
    """What a plan may use, the device with the figures that were reported, and remarks.

    Raises UsageError where neither evidence nor options say what the device has.
    """
    failure = question.failure
    if failure is not None and failure.capacity is not None:
        return _of_failure(question, failure, failure.capacity)
    if question.snapshot is not None and question.snapshot.at_oom and question.snapshot.free is not None:
        return _of_snapshot(question, question.snapshot.reserved + question.snapshot.free)
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
    hardware, notes = _device(question, capacity, _KINDS[failure.backend])
    overhead = min(hardware.context_bytes, capacity // 2)
    if failure.overhead is not None and failure.overhead >= _LEAST_CONTEXT:
        overhead = min(failure.overhead, capacity - 1)
    hardware = hardware.model_copy(update={"memory_bytes": capacity, "context_bytes": overhead})
    if failure.backend == "xpu":
        notes = (*notes, "no Intel GPU is described: its kernels and seconds are taken to be those of an NVIDIA GPU")
    said = "capacity and other processes as the message has them"
    return _room(question, hardware, failure.others or 0, said), hardware, notes


def _of_snapshot(question: DiagnoseRequest, held: int) -> tuple[Room, Hardware, tuple[str, ...]]:
    hardware, notes = _device(question, held, "cuda", below=False)
    # a snapshot does not know the context, so this is what the allocator had and could have had, and a usual context
    capacity = held + hardware.context_bytes
    hardware = hardware.model_copy(update={"memory_bytes": capacity})
    said = "reserved and free memory at the OOM, and a usual context"
    return _room(question, hardware, 0, said), hardware, notes


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


def _device(
    question: DiagnoseRequest, capacity: int, kind: HardwareKind, *, below: bool = True
) -> tuple[Hardware, tuple[str, ...]]:
    if question.hardware is None:
        return _nearest(capacity, kind, below=below)
    has = question.hardware.memory_bytes
    if abs(has / capacity - 1) > _FAR:
        note = f"{question.hardware.name} has {format_binary(has)}, the failed run's device {format_binary(capacity)}"
        return question.hardware, (f"{note}: kernels and seconds are the former's, memory the latter's",)
    return question.hardware, ()


def _nearest(capacity: int, kind: HardwareKind, *, below: bool = True) -> tuple[Hardware, tuple[str, ...]]:
    """The described device whose memory comes nearest, and that this is a guess."""
    known = [h for name in list_hardware() if (h := load_hardware(name)).kind == kind]
    enough = [h for h in known if below or h.memory_bytes >= capacity] or known
    found = min(enough, key=lambda h: abs(h.memory_bytes - capacity))
    note = "which device it was is not known: kernels and seconds are those of"
    return found, (f"{note} {found.name}, whose memory comes nearest; --hardware NAME names yours",)
