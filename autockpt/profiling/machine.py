"""Measuring the machine at hand, figure by figure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.devices import Device
from autockpt.devices.random_states import all_random_states_kept
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring.environment import environment_of
from autockpt.profiling import probes
from autockpt.schema.device import Environment
from autockpt.schema.machine import Machine, ProductTime

MIB = 2**20
Tell = Callable[[str], None]


@dataclass(frozen=True)
class ProbeSizes:
    """How large the probes are. Bytes; matrix dimensions and tokens in elements."""

    squares: tuple[int, ...]
    skinny: tuple[tuple[int, int, int], ...]  # m, k, n
    traffic: tuple[int, ...]
    pool: int
    rows: int
    columns: int
    vector: int
    tokens: int
    copy: int
    large_copy: int
    repeats: int


SIZES = {
    ("cpu", False): ProbeSizes(
        squares=(64, 128, 256, 512, 1024),
        skinny=((768, 256, 688), (1024, 32, 1024), (512, 1024, 64), (16, 512, 512)),
        traffic=(MIB // 4, MIB, 4 * MIB, 12 * MIB, 32 * MIB, 96 * MIB, 256 * MIB),
        pool=128 * MIB,
        rows=1024,
        columns=512,
        vector=32768,
        tokens=384,
        copy=4 * MIB,
        large_copy=32 * MIB,
        repeats=9,
    ),
    ("cpu", True): ProbeSizes(
        squares=(128, 256, 512),
        skinny=((1024, 32, 1024), (512, 512, 64)),
        traffic=(MIB, 8 * MIB, 32 * MIB, 128 * MIB),
        pool=96 * MIB,
        rows=512,
        columns=512,
        vector=32768,
        tokens=256,
        copy=4 * MIB,
        large_copy=16 * MIB,
        repeats=3,
    ),
    ("accelerator", False): ProbeSizes(
        squares=(256, 512, 1024, 2048, 4096, 8192),
        skinny=((4096, 64, 4096), (8192, 256, 1024), (2048, 4096, 256), (64, 4096, 4096)),
        traffic=(MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB, 1536 * MIB),
        pool=1024 * MIB,
        rows=8192,
        columns=4096,
        vector=2**20,
        tokens=4096,
        copy=32 * MIB,
        large_copy=256 * MIB,
        repeats=9,
    ),
    ("accelerator", True): ProbeSizes(
        squares=(512, 2048, 4096),
        skinny=((4096, 64, 4096), (2048, 4096, 256)),
        traffic=(8 * MIB, 128 * MIB, 768 * MIB),
        pool=512 * MIB,
        rows=4096,
        columns=4096,
        vector=2**20,
        tokens=2048,
        copy=32 * MIB,
        large_copy=128 * MIB,
        repeats=3,
    ),
}
SLOW_SHARE = 0.2  # of the fp32 rate: a 16-bit type that is emulated is not worth large products
SMALL_KERNEL = 256  # elements: nothing but the start of a kernel


def measure_machine(device: Device, *, quick: bool, tell: Tell) -> Machine:
    """Measure a device: rates, bandwidths, overheads. ``tell`` hears what is being measured.

    Raises MeasurementError where the device's backend cannot be measured, and DeviceOutOfMemory where it is too full.
    """
    sizes = SIZES["cpu" if device.kind == "cpu" else "accelerator", quick]
    started = time.perf_counter()
    environment = environment_of(device)
    try:
        with all_random_states_kept():
            return _measure(device, sizes, tell, started, environment)
    except Exception as error:
        if device.out_of_memory(error):
            raise DeviceOutOfMemory(
                f"{device.torch_device} has too little free memory to be measured",
                remedy="Wait until nothing else runs on it, or measure with --quick.",
            ) from None
        raise
    finally:
        device.release()


def _measure(device: Device, sizes: ProbeSizes, tell: Tell, started: float, environment: Environment) -> Machine:
    clock = probes.Stopwatch(device.torch_device, sizes.repeats)
    dtypes = _dtypes(device)
    half = torch.bfloat16 if "bfloat16" in dtypes else torch.float16
    if device.kind == "cpu":
        half = torch.float32
    found: dict[str, Any] = {}
    tell("matrix products")
    found["products"] = _products(clock, sizes, dtypes)
    tell("attention")
    found["attention_flops"], found["attention_backward_flops"] = probes.attention_flops(clock, half, sizes.tokens)
    tell("memory bandwidth")
    found["traffic"] = tuple(probes.traffic(clock, nbytes, sizes.pool) for nbytes in sizes.traffic)
    found["vector_flops"] = probes.vector_flops(clock, sizes.vector)
    tell("single kernels")
    found["elements"] = probes.time_elements(clock, sizes.rows, sizes.columns)
    tell("launch overhead")
    found["launch_seconds"], found["region_seconds"] = probes.host_costs(clock, 2 * sizes.repeats)
    found["watch_seconds"] = probes.watch_seconds(clock, sizes.repeats)
    tell("copies off the device and back")
    found["links"] = probes.time_links(clock, small=sizes.copy, large=sizes.large_copy)
    described = environment_of(device) if device.kind != "cpu" else environment  # libraries are loaded by now
    return Machine.model_validate(
        {
            **found,
            "kind": "rocm" if device.kind == "cuda" and torch.version.hip is not None else device.kind,
            "capability": torch.cuda.get_device_capability(device.torch_device) if device.kind == "cuda" else None,
            "environment": described,
            "attention_dtype": str(half).removeprefix("torch."),
            "kernel_seconds": _kernel_seconds(clock) if device.kind == "cuda" else 0.0,
            "memory_bytes": device.capacity(),
            "context_bytes": device.describe().overhead_bytes,
            "seconds": time.perf_counter() - started,
        }
    )


def _products(clock: probes.Stopwatch, sizes: ProbeSizes, dtypes: tuple[str, ...]) -> tuple[ProductTime, ...]:
    """Squares and skinny products in every type; only one small square where a type turns out to be emulated."""
    found: list[ProductTime] = []
    for dtype in dtypes:
        middle = sizes.squares[len(sizes.squares) // 2]
        first = probes.time_product(clock, dtype, middle, middle, middle)
        reference = next((p for p in found if p.m == p.n == p.k == middle), first)
        found.append(first)
        if first.seconds * SLOW_SHARE > reference.seconds:
            continue
        shapes = [(s, s, s) for s in sizes.squares if s != middle] + list(sizes.skinny)
        found += [probes.time_product(clock, dtype, *shape) for shape in shapes]
    return tuple(found)


def _dtypes(device: Device) -> tuple[str, ...]:
    """Types that the device has instructions for, as far as PyTorch knows; a CPU emulates what it lacks."""
    if device.kind != "cuda":
        return ("float32", "bfloat16", "float16")
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    amd = torch.version.hip is not None
    ampere = amd or (major, minor) >= (8, 0)
    return ("float32", *(("tf32",) if ampere and not amd else ()), *(("bfloat16",) if ampere else ()), "float16")


def _kernel_seconds(clock: probes.Stopwatch) -> float:
    """A chain of kernels without work, long enough for the queue to be deep, recorded once and replayed as a graph."""
    x = torch.zeros(SMALL_KERNEL, device=clock.device)
    x.add_(1)
    graph, count = torch.cuda.CUDAGraph(), 200
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    return clock.seconds(graph.replay) / count
