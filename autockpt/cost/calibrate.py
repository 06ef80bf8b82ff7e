"""``autockpt calibrate``: measure the local machine and fit a hardware description to it.

Peaks are the best rates seen. Efficiencies are fitted to everything else that was measured. The worker process that
measures steps measures this, too, as its settings matter.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch.nn import functional

from autockpt.cost.op_times import OpTimer, by_transport, keep_busy
from autockpt.devices import Device, get_device
from autockpt.devices.random_states import all_random_states_kept
from autockpt.errors import MeasurementError
from autockpt.interpreter import patched
from autockpt.measuring import StepRunner, WorkerMeasurer
from autockpt.measuring.device_lock import device_lock
from autockpt.measuring.environment import environment_of
from autockpt.measuring.failures import releasing_memory
from autockpt.runtime import attach
from autockpt.schema.base import first_violation
from autockpt.schema.choices import RECOMPUTE, Choice
from autockpt.schema.hardware import Efficiency, Hardware
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, discover_units

MIB = 2**20
TINY = WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8, optimizer="sgd")
# What is timed on a CPU; matrices are this many times as wide and tensors half as many times as large elsewhere.
SCALE = 8
SHAPES = [(n, n, n) for n in (64, 256, 128, 512, 1024)] + [(1024, 32, 1024), (512, 1024, 64), (768, 256, 688)]
TRAFFIC = (MIB // 4, MIB, 4 * MIB, 12 * MIB, 32 * MIB, 96 * MIB, 256 * MIB)
TOKENS, WIDTH, HEADS, COPY = 384, 64, 8, 4 * MIB
COPIES = 8  # at once
SLOW_SHARE = 0.2  # of the fp32 rate: a 16-bit type that is emulated is not worth large products
MOVING_SHARE = 0.5  # of a product's time: where its bytes may take more they say nothing about its arithmetic
LEAST_SHARE, MOST_FIXED = 0.05, 1e-3
LEAST_SAMPLE = 2e-3  # seconds: shorter samples are repeated until they last that long
SECONDS_AHEAD_PER_CALL = 2e-5
Tell = Callable[[str], None]


class Product(NamedTuple):
    """One matrix product, (m × k) by (k × n), in seconds."""

    dtype: str
    shape: tuple[int, int, int]
    seconds: float

    @property
    def flops(self) -> float:
        """A multiply and an add are two."""
        return 2.0 * math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """Both matrices and the result, once."""
        (m, k, n), width = self.shape, 2 if self.dtype.endswith("16") else 4
        return float(width * (m * k + k * n + m * n))


def measure_in_child(device: str | None, *, quick: bool, tell: Tell) -> Hardware:
    """The description of a machine, without a name; ``tell`` hears what is being measured.

    Raises MeasurementError where the worker dies or measurements contradict one another, DeviceOutOfMemory where the
    device is too full, UsageError for a device that is not there.
    """
    with device_lock(get_device(device), tell), WorkerMeasurer(TINY, device) as worker:
        worker.beat = tell
        return Hardware.model_validate(worker.call("autockpt.cost.calibrate:measure_in_runner", {"quick": quick}))


def measure_in_runner(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the runner's device, by a model that hardly computes anything."""
    with all_random_states_kept(), releasing_memory(runner.device, "measuring the machine"):
        found = measure(runner.device, runner.workload, runner.beat, 3 if payload["quick"] else 9)
    return found.model_dump(mode="json")


def measure(device: Device, tiny: Step, tell: Tell, repeats: int, largest: float = math.inf) -> Hardware:
    """All figures of a device. ``tiny`` is a step with little arithmetic; what has ``largest`` bytes is not timed."""
    on_cpu, nvidia = device.kind == "cpu", device.kind == "cuda" and torch.version.hip is None
    clock, scale = Stopwatch(device.torch_device, repeats), 1 if on_cpu else SCALE
    tell("matrix products")
    capability = torch.cuda.get_device_capability(clock.device) if device.kind == "cuda" else None
    tf32 = ("tf32",) if nvidia and capability is not None and capability >= (8, 0) else ()
    shapes = [(m * scale, k * scale, n * scale) for m, k, n in SHAPES if 4 * m * n < largest]
    products = _products(clock, ("float32", *tf32, "bfloat16", "float16"), shapes)
    peaks = {p.dtype: max(q.flops / q.seconds for q in products if q.dtype == p.dtype) for p in products}
    tell("attention")
    half = "float32" if on_cpu else max(("bfloat16", "float16"), key=lambda dtype: peaks[dtype])
    attention = [rate / peaks[half] for rate in _attention_flops(clock, getattr(torch, half), TOKENS * scale)]
    tell("memory bandwidth")
    sizes = [size * max(1, scale // 2) for size in TRAFFIC if size < largest]
    memory, cache_bytes, cache_rate = fit_traffic({size: _traffic(clock, size, sizes[-1] // 2) for size in sizes})
    x, y, z = (torch.rand(MIB // 32 * scale**2, device=clock.device) for _ in range(3))  # fit into a near cache
    vector = 2.0 * x.numel() / clock.seconds(lambda: torch.addcmul(z, x, y, out=z))
    kernel = 0.0 if on_cpu else clock.seconds(lambda: x[:256].add_(1))
    matrix, half_size, fixed = fit_products(products, peaks, kernel, memory)
    tell("launch overhead")
    launch, region = host_costs(clock, tiny, 2 * repeats)
    tell("copies off the device and back")
    out, back = by_transport(device.torch_device, COPY * scale, COPIES, device.synchronize)
    figures = {
        "vector_flops": min(vector, peaks["float32"]),
        "bandwidth": memory,
        "cache_bandwidth": max(cache_rate, memory) if cache_bytes else None,
        "launch_seconds": launch,
        "region_seconds": region,
        "kernel_seconds": kernel,
        "link_out": out,
        "link_in": back,
    }
    shares = {"matrix": matrix, "attention": attention[0], "attention_backward": attention[1]}
    shares = {name: min(1.0, max(LEAST_SHARE, share)) for name, share in shares.items()}
    fitted = {"bandwidth": 1.0, "link": 1.0, "half_size": half_size, "matrix_seconds": fixed}
    try:
        return Hardware(
            name="measured",
            description=environment_of(device).device.name,
            kind="rocm" if device.kind == "cuda" and not nvidia else device.kind,
            capability=capability,
            memory_bytes=device.capacity(),
            context_bytes=device.describe().overhead_bytes,
            matrix_flops=_rounded(peaks),
            cache_bytes=cache_bytes,
            efficiency=Efficiency(**_rounded(shares | fitted)),
            environment=environment_of(device),
            measured=date.today().isoformat(),
            **_rounded(figures),
        )
    except ValidationError as error:
        raise MeasurementError(
            f"what was measured contradicts itself: {': '.join(filter(None, first_violation(error)))}",
            remedy="Measure again while nothing else runs on the machine, without --quick.",
        ) from None


def fit_traffic(traffic: Mapping[int, float]) -> tuple[float, int, float]:
    """Memory bandwidth, the cache's bytes and its bandwidth, from the rates of growing working sets.

    No cache (0, and memory's own rate) where small sets are hardly faster than large ones.
    """
    nbytes, rates = np.array([*traffic], float), np.array([*traffic.values()])
    memory, best = float(rates[-1]), float(rates.max())
    if best < 1.2 * memory:
        return memory, 0, memory

    def error(cache: float) -> float:
        cached = np.minimum(1.0, cache / nbytes)
        return float(np.sum(np.log((cached / best + (1 - cached) / memory) * rates) ** 2))

    return memory, int(min(np.geomspace(nbytes[0], nbytes[-1], 60), key=error)), best


def fit_products(
    products: Sequence[Product], peaks: Mapping[str, float], kernel: float, memory: float
) -> tuple[float, float, float]:
    """Share of the peak, half size and fixed seconds with which the roofline meets all products best, in ratios.

    Seconds are ``kernel`` + fixed + ideal / share · (1 + half size / smallest dimension): linear, and none is negative.
    """
    dtypes = [p.dtype for p in products]
    used = [p for p in products if dtypes.count(p.dtype) > 2 and p.bytes / memory < MOVING_SHARE * p.seconds]
    if len(used) < 4:
        return 1.0, 0.0, 0.0
    seconds = np.array([p.seconds for p in used])
    ideal = np.array([p.flops / peaks[p.dtype] for p in used])
    terms = np.stack([ideal, ideal / [min(p.shape) for p in used], np.ones(len(used))], axis=1) / seconds[:, None]
    left, found = [0, 1, 2], np.zeros(3)
    while left:
        solution, *_ = np.linalg.lstsq(terms[:, left], 1 - kernel / seconds, rcond=None)
        if (solution >= 0).all():
            found[left] = solution
            break
        left.pop(int(np.argmin(solution)))
    slope = max(float(found[0]), 1.0)  # no product is faster than the peak
    return 1 / slope, float(found[1]) / slope, min(float(found[2]), MOST_FIXED)


def _products(clock: Stopwatch, dtypes: Sequence[str], shapes: Sequence[tuple[int, int, int]]) -> list[Product]:
    """All shapes in every type, but only the first shape in a type that is so slow that it must be emulated."""
    found: list[Product] = []
    for dtype in dtypes:
        for number, (m, k, n) in enumerate(shapes):
            kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
            a, b = torch.randn(m, k, device=clock.device).to(kind), torch.randn(k, n, device=clock.device).to(kind)
            with patched(torch.backends.cuda.matmul, "allow_tf32", dtype == "tf32"):
                found.append(Product(dtype, (m, k, n), clock.seconds(lambda a=a, b=b: torch.mm(a, b))))
            if not number and found[-1].seconds * SLOW_SHARE > found[0].seconds:
                break
    return found


def _attention_flops(clock: Stopwatch, dtype: torch.dtype, tokens: int) -> tuple[float, float]:
    """FLOP/s of fused attention, forward (two products of tokens × tokens × width per head) and backward (five)."""
    shape = (1, HEADS, tokens, WIDTH)
    q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=clock.device, dtype=dtype)

    forward = partial(functional.scaled_dot_product_attention, q, k, v)
    seconds = clock.seconds(forward)
    backward = clock.seconds(lambda: torch.autograd.grad(forward(), (q, k, v), upstream)) - seconds
    one = 2.0 * HEADS * tokens * tokens * WIDTH
    return 2 * one / seconds, 5 * one / max(backward, 0.1 * seconds)


def _traffic(clock: Stopwatch, nbytes: int, pool_bytes: int) -> float:
    """Bytes per second of additions of two tensors into a third, ``nbytes`` in all, as a step makes them.

    One operand is what the addition before has written, the other and the result have been out of use for
    ``pool_bytes``: a chain in one small set of tensors would find all in the nearest cache and promise too much.
    """
    elements = max(1, nbytes // 12)
    count = max(3, pool_bytes // (4 * elements))
    pool = [torch.zeros(elements, device=clock.device) for _ in range(count)]
    places = itertools.cycle([(pool[i - 1], pool[(i + count // 2) % count], pool[i]) for i in range(count)])

    def add() -> None:
        before, other, result = next(places)
        torch.add(before, other, out=result)

    return 12 * elements / clock.seconds(add)


@dataclass(frozen=True)
class Stopwatch:
    """Seconds of a function on one device: the median of ``repeats`` samples after a warm-up.

    On one CPU thread the processor's own time counts, so that what else runs on the machine is no part of it; on an
    accelerator events on the device, so that the host is none.
    """

    device: torch.device
    repeats: int = 7

    def seconds(self, fn: Callable[[], Any]) -> float:
        """Of one call of ``fn``."""
        fn()
        calls = max(1, min(1000, round(LEAST_SAMPLE / max(self.sample(fn, 1), 1e-7))))
        return statistics.median(self.sample(fn, calls) for _ in range(self.repeats)) / calls

    def sample(self, fn: Callable[[], Any], calls: int, *, of_host: bool = False) -> float:
        """Seconds of ``calls`` calls, or the host's part of them: an accelerator is not waited for."""
        on_cpu = self.device.type == "cpu"
        if not on_cpu and of_host:
            torch.accelerator.synchronize(self.device)
        elif not on_cpu:
            keep_busy(self.device, calls * SECONDS_AHEAD_PER_CALL)
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            stream = torch.accelerator.current_stream(self.device)
            begin.record(stream)
            for _ in range(calls):
                fn()
            end.record(stream)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for _ in range(calls):
            fn()
        return clock() - start


def host_costs(clock: Stopwatch, workload: Step, cycles: int) -> tuple[float, float]:
    """Host seconds per op of a training step, and per recomputed region besides its ops.

    ``workload`` is a real step with next to no arithmetic; its cycles are interleaved, plainly and with every layer
    recomputed.
    """
    layers = [unit.name for unit in discover_units(workload.model) if unit.role == "block"]
    plans: tuple[dict[str, Choice], ...] = ({}, dict.fromkeys(layers, RECOMPUTE))
    ops, seconds = [0, 0], ([], [])
    for _ in range(cycles):
        for place, plan in enumerate(plans):
            with attach(workload.model, plan, sentinels="off") as session:
                session.sentinels.in_mid_training = True
                with OpTimer(clock.device) as timer:  # and a cycle that warms up
                    workload.cycle()
                timer.finish()
                ops[place] = sum(map(len, timer.seconds.values()))
                seconds[place].append(clock.sample(workload.cycle, 1, of_host=True))
    launch = statistics.median(seconds[0]) / ops[0]
    extra = statistics.median(again - plain for plain, again in zip(*seconds, strict=True))
    return launch, max(extra - (ops[1] - ops[0]) * launch, 0.0) / len(layers)


def _rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Round to four significant digits."""
    return {name: value and float(f"{value:.4g}") for name, value in figures.items()}
