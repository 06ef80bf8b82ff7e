"""What several items need: a workload on the device, plans by name, memory and digests of a step."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from autockpt.devices import Device, get_device
from autockpt.measuring import StepRunner
from autockpt.schema import RECOMPUTE, SAVE, Choice, Graph, WorkloadSpec, parse_choice
from autockpt.schema.choices import Offload
from autockpt.tracing import Tracer
from autockpt.verification import deterministic_algorithms, digest
from autockpt.workload import build, discover_units


@contextmanager
def running(
    spec: WorkloadSpec, device_name: str, meter: type[StepRunner] = StepRunner
) -> Iterator[tuple[StepRunner, list[str]]]:
    """A workload built in this process under the one meter of steps, and the names of its blocks."""
    device: Device = get_device(device_name)
    device.describe()  # opens the context while what others hold can still be told apart
    if device.kind != "cpu":
        torch.accelerator.set_device_index(device.torch_device.index or 0)
    workload = build(spec, device.torch_device)
    runner = meter(workload, device)
    try:
        yield runner, [u.name for u in discover_units(workload.model) if u.role == "block"]
    finally:
        runner.close()


def ghosts(spec: WorkloadSpec, device_name: str) -> Tracer:
    """Ghost runs of the workload, with the device's kernels."""
    return Tracer.from_spec(spec, device=get_device(device_name).torch_device)


def repeatable(device_name: str) -> AbstractContextManager[object]:
    """Kernels repeat themselves bit by bit, or raise."""
    return deterministic_algorithms(strict=True) if device_name != "cpu" else nullcontext()


def plans(units: list[str], names: tuple[str, ...]) -> dict[str, dict[str, Choice]]:
    """Plans by the names that the pages use."""
    kinds = [parse_choice(kind) for kind in ("save", "recompute", "keep_attention", "selective", "offload")]
    draw = random.Random(7)
    table: dict[str, Callable[[int], Choice]] = {
        "save everything": lambda i: SAVE,
        "recompute all": lambda i: RECOMPUTE,
        "every second": lambda i: RECOMPUTE if i % 2 == 0 else SAVE,
        "keep attention": lambda i: kinds[2],
        "keep matmuls and attention": lambda i: kinds[3],
        "offload all": lambda i: kinds[4],
        "offload every fourth": lambda i: Offload(window=3) if i % 4 == 0 else SAVE,
        "offload every eighth": lambda i: Offload(window=6) if i % 8 == 0 else SAVE,
        "recompute and offload": lambda i: parse_choice("recompute_offload"),
        "mixed": lambda i: draw.choice(kinds),
    }
    return {name: {unit: table[name](i) for i, unit in enumerate(units)} for name in names}


def allocated(device: torch.device) -> int | None:
    """Bytes that tensors hold on the device now, in whole blocks of its allocator; None where it cannot be asked."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def alive_before(graph: Graph, index: int) -> int:
    """Bytes that the ghost run holds when op ``index`` is about to run, resident ones included."""
    alive = (s for s in graph.storages if 0 <= s.birth < index and (s.death is None or s.death >= index))
    return graph.resident_bytes + sum(s.bytes for s in alive)


def first_of(graph: Graph, phases: tuple[str, ...]) -> int:
    """The first op of the phases."""
    return next((op.index for op in graph.ops if op.phase in phases), len(graph.ops))


def gradients_of(runner: StepRunner) -> dict[str, str]:
    """Digests of loss and gradients of one seeded forward and backward; gradients are dropped afterwards."""
    runner.seed()
    loss = runner.workload.forward_backward()
    named = {name: p.grad for name, p in runner.workload.model.named_parameters() if p.grad is not None}
    found = {name: digest(tensor) for name, tensor in {"loss": loss, **named}.items()}
    runner.workload.release_gradients()
    return found


def wrong(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Names whose digests differ."""
    return [name for name in wanted if found.get(name) != wanted[name]]


def never_timed(graph: Graph, known: Mapping[str, float]) -> list[str]:
    """Signatures of the ghost run that real steps did not show. The optimizer's ops are timed as one."""
    mine = dict.fromkeys(graph.signatures[op.signature] for op in graph.ops if op.phase != "optimizer")
    return [name for name in mine if name not in known]
