"""``autockpt calibrate``: the local machine as a hardware description. Measured, then fitted.

Peaks are the best rates seen. Efficiencies are those that explain everything else that was measured. Measuring takes
place in the process that measures steps, with its settings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from itertools import product
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch.nn import functional

from autockpt.cost.probes import Stopwatch, by_transport, host_costs
from autockpt.cost.roofline import seconds_of_work
from autockpt.cost.work import Work
from autockpt.devices import Device
from autockpt.devices.random_states import all_random_states_kept
from autockpt.errors import MeasurementError
from autockpt.measuring import StepRunner, WorkerMeasurer
from autockpt.measuring.environment import environment_of
from autockpt.measuring.failures import letting_go
from autockpt.policies.base import setting
from autockpt.schema.base import first_violation
from autockpt.schema.hardware import Efficiency, Hardware
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step

MIB = 2**20
TINY = WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8, optimizer="sgd")
SLOW_SHARE = 0.2  # of the fp32 rate: a 16-bit type that is emulated is not worth large products
WORTH_STATING = 1.15  # a kernel this much slower than its bytes gets a rate of its own
LEAST_SHARE, MOST_HALF, MOST_FIXED = 0.05, 10_000.0, 1e-3
COPIES = 8  # at once
GRID, ZOOMS = 13, 8  # points of each parameter, and how often the grid is laid around the best of them
Tell = Callable[[str], None]
Shape = tuple[int, int, int]  # m, k, n


@dataclass(frozen=True)
class Sizes:
    """How large the probes are. Bytes; matrix dimensions and tokens in elements."""

    squares: tuple[int, ...]
    skinny: tuple[Shape, ...]
    traffic: tuple[int, ...]
    rows: int
    columns: int
    tokens: int
    copy: int


CPU = Sizes(
    squares=(64, 256, 128, 512, 1024),
    skinny=((1024, 32, 1024), (512, 1024, 64), (768, 256, 688), (16, 512, 512)),
    traffic=(MIB // 4, MIB, 4 * MIB, 12 * MIB, 32 * MIB, 96 * MIB, 256 * MIB),
    rows=1024,
    columns=512,
    tokens=384,
    copy=4 * MIB,
)
ACCELERATOR = Sizes(
    squares=(512, 2048, 256, 4096, 1024, 8192),
    skinny=((4096, 64, 4096), (2048, 4096, 256), (8192, 256, 1024), (64, 4096, 4096)),
    traffic=(MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB, 1536 * MIB),
    rows=8192,
    columns=4096,
    tokens=4096,
    copy=32 * MIB,
)


@dataclass(frozen=True)
class Product:
    """One matrix product, (m × k) by (k × n), in seconds."""

    dtype: str
    shape: Shape
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


@dataclass(frozen=True)
class Measured:
    """``figures`` are those of a description; ``traffic`` bytes per second by growing bytes of a kernel; ``elements``
    the elements, bytes and seconds of kernels by the names of their ops."""

    figures: Mapping[str, Any]
    products: Sequence[Product]
    attention: tuple[str, float, float]  # type, FLOP/s of forward and backward
    traffic: Mapping[int, float]
    elements: Mapping[str, tuple[int, float, float]]


def measure_in_child(device: str | None, *, quick: bool, tell: Tell) -> Hardware:
    """The description of a machine, without a name; ``tell`` hears what is being measured.

    Raises MeasurementError where the worker dies or measurements contradict one another, DeviceOutOfMemory where the
    device is too full, UsageError for a device that is not there.
    """
    with WorkerMeasurer(TINY, device) as worker:
        worker.beat = tell
        return Hardware.model_validate(worker.call("autockpt.cost.calibrate:measure_in_runner", {"quick": quick}))


def measure_in_runner(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the runner's device, by a model that hardly computes anything."""
    device = runner.device
    sizes, repeats = CPU if device.kind == "cpu" else ACCELERATOR, 3 if payload["quick"] else 9
    with all_random_states_kept(), letting_go(device, "measuring the machine"):
        found = measure(device, sizes, repeats, runner.beat, runner.workload)
    return described(found).model_dump(mode="json")


def measure(device: Device, sizes: Sizes, repeats: int, tell: Tell, tiny: Step) -> Measured:
    """All figures of a device. ``tiny`` is a step with little arithmetic."""
    clock, on_cpu = Stopwatch(device.torch_device, repeats), device.kind == "cpu"
    dtypes = _dtypes(device)
    half = "float32" if on_cpu else "bfloat16" if "bfloat16" in dtypes else "float16"
    tell("matrix products")
    products = _products(clock, dtypes, [*((size, size, size) for size in sizes.squares), *sizes.skinny])
    tell("attention")
    attention = (half, *_attention_flops(clock, getattr(torch, half), sizes.tokens))
    tell("memory bandwidth")
    traffic = {nbytes: _traffic(clock, nbytes, sizes.traffic[-1] // 2) for nbytes in sizes.traffic}
    near = sizes.rows * sizes.columns // 16  # elements that fit into a near cache
    x, y, z = (torch.rand(near, device=clock.device) for _ in range(3))
    vector = 2.0 * near / clock.seconds(lambda: torch.addcmul(z, x, y, out=z))
    tell("single kernels")
    elements = dict(_elements(clock, sizes.rows, sizes.columns))
    tell("launch overhead")
    launch, region = host_costs(clock, tiny, 2 * repeats)
    tell("copies off the device and back")
    out, back = by_transport(device.torch_device, sizes.copy, COPIES, time.perf_counter, device.synchronize)
    figures = {
        "description": environment_of(device).device.name,
        "kind": "rocm" if device.kind == "cuda" and torch.version.hip is not None else device.kind,
        "capability": torch.cuda.get_device_capability(device.torch_device) if device.kind == "cuda" else None,
        "memory_bytes": device.capacity(),
        "context_bytes": device.describe().overhead_bytes,
        "vector_flops": vector,
        "launch_seconds": launch,
        "region_seconds": region,
        "kernel_seconds": 0.0 if on_cpu else clock.seconds(lambda: x[:256].add_(1)),
        "link_out": out,
        "link_in": back,
        "environment": environment_of(device),
    }
    return Measured(figures, products, attention, traffic, elements)


def described(found: Measured, day: date | None = None) -> Hardware:
    """The description of a measured machine. Raises MeasurementError where measurements contradict one another."""
    memory, cache_bytes, cache_rate = fit_traffic(found.traffic)
    peaks = {p.dtype: max(q.flops / q.seconds for q in found.products if q.dtype == p.dtype) for p in found.products}
    kernel = found.figures["kernel_seconds"]
    matrix, half_size, fixed = fit_products(found.products, peaks, kernel, (memory, cache_bytes, cache_rate))
    dtype, *attention = found.attention
    data = {name: _rounded(value) if isinstance(value, float) else value for name, value in found.figures.items()}
    data |= {
        "name": "measured",
        "vector_flops": _rounded(min(data["vector_flops"], peaks["float32"])),
        "matrix_flops": {name: _rounded(rate) for name, rate in peaks.items()},
        "bandwidth": _rounded(memory),
        "cache_bytes": cache_bytes,
        "cache_bandwidth": _rounded(max(cache_rate, memory)) if cache_bytes else None,
        "efficiency": Efficiency(
            matrix=_share(matrix),
            attention=_share(attention[0] / peaks[dtype]),
            attention_backward=_share(attention[1] / peaks[dtype]),
            bandwidth=1.0,
            link=1.0,
            half_size=_rounded(half_size),
            matrix_seconds=_rounded(fixed),
        ),
        "measured": (day or date.today()).isoformat(),
    }
    try:
        hardware = Hardware.model_validate(data)
        rates = {}
        for name, (elements, nbytes, seconds) in found.elements.items():
            work = Work("elements", name, bytes=nbytes, elements=elements)
            if seconds > WORTH_STATING * seconds_of_work(hardware, work):
                rates[name] = _rounded(elements / seconds)
        return hardware.model_copy(update={"element_rates": rates})
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
    products: Sequence[Product], peaks: Mapping[str, float], kernel: float, traffic: tuple[float, int, float]
) -> tuple[float, float, float]:
    """Share of the peak, half size and fixed seconds with which the roofline meets all products best, in ratios."""
    dtypes = [p.dtype for p in products]
    used = [p for p in products if dtypes.count(p.dtype) > 2]
    if len(used) < 4:
        return 1.0, 0.0, 0.0
    memory, cache_bytes, cache_rate = traffic
    ideal = np.array([p.flops / peaks[p.dtype] for p in used])
    least = np.array([min(p.shape) for p in used], float)
    nbytes, seconds = np.array([p.bytes for p in used]), np.array([p.seconds for p in used])
    cached = np.minimum(1.0, cache_bytes / nbytes)
    moving = nbytes * (cached / cache_rate + (1 - cached) / memory)

    def values(point: Sequence[float]) -> tuple[float, float, float]:
        return LEAST_SHARE + (1 - LEAST_SHARE) * point[0], MOST_HALF * point[1] ** 4, MOST_FIXED * point[2] ** 4

    def error(point: Sequence[float]) -> float:
        share, half, fixed = values(point)
        said = kernel + fixed + np.maximum(ideal / share * (1 + half / least), moving)
        return float(np.sum(np.sqrt(1 + (np.log(said / seconds) / 0.1) ** 2)))  # single outliers hardly count

    best, reach = (0.5, 0.5, 0.5), 0.5
    for _ in range(ZOOMS):
        axes = [np.linspace(max(0.0, at - reach), min(1.0, at + reach), GRID) for at in best]
        best, reach = min(product(*axes), key=error), reach / 3
    return values(best)


def _products(clock: Stopwatch, dtypes: Sequence[str], shapes: Sequence[Shape]) -> list[Product]:
    """All shapes in every type; only the first in one that is so slow that it must be emulated."""
    found: list[Product] = []
    for dtype in dtypes:
        first = time_product(clock, dtype, shapes[0])
        found.append(first)
        if first.seconds * SLOW_SHARE <= found[0].seconds:
            found += [time_product(clock, dtype, shape) for shape in shapes[1:]]
    return found


def time_product(clock: Stopwatch, dtype: str, shape: Shape) -> Product:
    """A matrix product; ``tf32`` is one in fp32 with TF32 allowed."""
    m, k, n = shape
    kind = getattr(torch, "float32" if dtype == "tf32" else dtype)
    a, b = torch.randn(m, k, device=clock.device).to(kind), torch.randn(k, n, device=clock.device).to(kind)
    with setting(torch.backends.cuda.matmul, "allow_tf32", dtype == "tf32"):
        return Product(dtype, shape, clock.seconds(lambda: torch.mm(a, b)))


def _attention_flops(clock: Stopwatch, dtype: torch.dtype, tokens: int, width: int = 64) -> tuple[float, float]:
    """FLOP/s of fused attention, forward (two products of tokens × tokens × width per head) and backward (five)."""
    shape = (1, 8, tokens, width)
    q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=clock.device, dtype=dtype)

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    seconds = clock.seconds(forward)
    backward = clock.seconds(lambda: torch.autograd.grad(forward(), (q, k, v), upstream)) - seconds
    one = 2.0 * 8 * tokens * tokens * width
    return 2 * one / seconds, 5 * one / max(backward, 0.1 * seconds)


def _traffic(clock: Stopwatch, nbytes: int, pool_bytes: int) -> float:
    """Bytes per second of additions of two tensors into a third, ``nbytes`` in all, as a step makes them.

    One operand is what the addition before has written, the other and the result have been out of use for
    ``pool_bytes``: a chain in one small set of tensors would find all in the nearest cache and promise too much.
    """
    elements = max(1, nbytes // 12)
    count = max(3, pool_bytes // (4 * elements))
    pool = [torch.zeros(elements, device=clock.device) for _ in range(count)]
    place = 0

    def add() -> None:
        nonlocal place
        before, place = pool[place], (place + 1) % count
        torch.add(before, pool[(place + count // 2) % count], out=pool[place])

    return 12 * elements / clock.seconds(add)


def element_calls(device: torch.device, rows: int, columns: int) -> dict[str, tuple[float, tuple[Any, ...]]]:
    """Arguments of ops by name, with how many fp32 matrices of rows × columns they read and write."""
    x = torch.randn(rows, columns, device=device)
    y, positive = torch.randn_like(x), torch.rand_like(x) + 0.5
    weight, bias = torch.ones(columns, device=device), torch.zeros(columns, device=device)
    picked = torch.randint(0, rows, (rows,), device=device)
    # in one block, as masks are: a random one would measure branches
    mask = torch.arange(columns, device=device).expand(rows, -1) < columns // 2
    norm = ([columns], weight, bias, 1e-5)
    _, mean, rstd = torch.native_layer_norm(x, *norm)
    unary = "tanh gelu silu sigmoid exp erf log sin cos rsqrt sqrt".split()  # noqa: SIM905
    return {
        **{name: (2, (positive if name in ("log", "rsqrt", "sqrt") else x,)) for name in unary},
        **{f"{name}_backward": (3, (x, y)) for name in ("tanh", "gelu", "silu")},
        "pow": (2, (positive, 3.0)),
        "div": (3, (x, positive)),
        "_softmax": (2, (x, -1, False)),
        "_safe_softmax": (2, (x, -1)),
        "_softmax_backward_data": (3, (y, torch.softmax(x, -1), -1, torch.float32)),
        "_log_softmax": (2, (x, -1, False)),
        "_log_softmax_backward_data": (3, (y, torch.log_softmax(x, -1), -1, torch.float32)),
        "native_layer_norm": (2, (x, *norm)),
        "native_layer_norm_backward": (3, (y, x, [columns], mean, rstd, weight, bias, [True, True, True])),
        "mean": (1, (x, [-1], True)),
        "sum": (1, (x, [0], True)),
        "bernoulli_": (2, (torch.empty_like(x), 0.9)),
        "native_dropout": (2, (x, 0.1, True)),
        "where": (3, (mask, x, y)),
        "cat": (4, ([x, y], -1)),
        "embedding": (2, (x, picked)),
        "embedding_dense_backward": (2, (x, picked, rows, -1, False)),
        "strided_copy": (2, (x.view(8, rows // 8, columns // 64, 64).transpose(1, 2),)),
    }


def _elements(clock: Stopwatch, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, float, float]]]:
    """Elements, bytes and seconds of ``element_calls``; a kernel that this device does not have is left out."""
    for name, (tensors, args) in element_calls(clock.device, rows, columns).items():
        function = getattr(torch.ops.aten, "contiguous" if name == "strided_copy" else name)
        with suppress(RuntimeError, NotImplementedError):
            seconds = clock.seconds(lambda f=function, a=args: f(*a))
            elements = rows * columns * (2 if name == "cat" else 1)
            yield name, (elements, 4.0 * tensors * rows * columns, seconds)


def _dtypes(device: Device) -> tuple[str, ...]:
    """Types that the device has instructions for, as far as PyTorch knows; a CPU emulates what it lacks."""
    if device.kind != "cuda":
        return ("float32", "bfloat16", "float16")
    amd = torch.version.hip is not None
    ampere = amd or torch.cuda.get_device_capability(device.torch_device) >= (8, 0)
    return ("float32", *(("tf32",) if ampere and not amd else ()), *(("bfloat16",) if ampere else ()), "float16")


def _share(value: float) -> float:
    return _rounded(min(1.0, max(LEAST_SHARE, value)))


def _rounded(value: float) -> float:
    """Four significant digits: no more is known."""
    return round(value, 3 - math.floor(math.log10(abs(value)))) if value else value
