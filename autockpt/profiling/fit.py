"""From what was measured on a machine to its description: peaks, and the efficiencies that explain everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from autockpt.hardware.roofline import seconds_of_work
from autockpt.hardware.work import Work
from autockpt.schema.hardware import Efficiency, Hardware
from autockpt.schema.machine import ElementTime, Machine, ProductTime, Traffic

WORTH_STATING = 1.15  # a kernel this much slower than its bytes gets a rate of its own
LEAST_SHARE = 0.05
MEASURED = "measured by autockpt calibrate"


def fit_hardware(machine: Machine, name: str, *, day: date | None = None) -> Hardware:
    """The description of a measured machine. Peaks are the best rates seen, efficiencies are fitted to the rest.

    Raises ValidationError (pydantic) where the measurements contradict one another.
    """
    memory, cache_bytes, cache_rate = fit_traffic(machine.traffic)
    peaks = _peaks(machine.products)
    matrix, half_size, fixed = fit_products(machine, peaks, memory, cache_bytes, cache_rate)
    links = machine.links
    vector = min(machine.vector_flops, peaks["float32"])
    described = Hardware(
        name=name,
        description=machine.environment.device.name,
        kind=machine.kind,
        capability=machine.capability,
        memory_bytes=machine.memory_bytes,
        context_bytes=machine.context_bytes,
        vector_flops=_rounded(vector),
        matrix_flops={dtype: _rounded(rate) for dtype, rate in peaks.items()},
        bandwidth=_rounded(memory),
        cache_bytes=cache_bytes,
        cache_bandwidth=_rounded(max(cache_rate, memory)) if cache_bytes else None,
        launch_seconds=_rounded(machine.launch_seconds),
        region_seconds=_rounded(machine.region_seconds),
        watch_seconds=_rounded(machine.watch_seconds),
        kernel_seconds=_rounded(machine.kernel_seconds),
        link_out=_rounded(links.out),
        link_in=_rounded(links.back),
        pageable_out=_rounded(links.pageable_out),
        pageable_in=_rounded(links.pageable_back),
        efficiency=Efficiency(
            matrix=_share(matrix),
            attention=_share(machine.attention_flops / peaks[machine.attention_dtype]),
            attention_backward=_share(machine.attention_backward_flops / peaks[machine.attention_dtype]),
            bandwidth=1.0,
            link=_share(min(links.small_out / links.out, links.small_back / links.back)),
            half_size=_rounded(half_size),
            matrix_seconds=_rounded(fixed),
        ),
        environment=machine.environment,
        measured=(day or date.today()).isoformat(),
    )
    rates = fit_elements(described, machine.elements)
    described = described.model_copy(update={"element_rates": rates})
    stated = [
        n for n, value in described.model_dump().items() if value not in (None, {}, 0, "") and n not in _NO_FIGURE
    ]
    return Hardware.model_validate(described.model_dump() | {"sources": dict.fromkeys(stated, MEASURED)})


_NO_FIGURE = frozenset({"name", "description", "kind", "environment", "measured", "sources", "unified_memory"})


def fit_traffic(traffic: Sequence[Traffic]) -> tuple[float, int, float]:
    """Memory bandwidth, the cache's bytes and its bandwidth, from the rates of growing working sets.

    No cache (0, and memory's own rate) where small sets are hardly faster than large ones.
    """
    memory, best = traffic[-1].rate, max(t.rate for t in traffic)
    if best < 1.2 * memory:
        return memory, 0, memory
    nbytes = np.array([t.bytes for t in traffic], float)
    rates = np.array([t.rate for t in traffic])

    def error(cache: float) -> float:
        cached = np.minimum(1.0, cache / nbytes)
        said = 1.0 / (cached / best + (1 - cached) / memory)
        return float(np.sum(np.log(said / rates) ** 2))

    candidates = np.geomspace(nbytes[0], nbytes[-1], 60)
    return memory, int(min(candidates, key=error)), best


def fit_products(
    machine: Machine, peaks: dict[str, float], memory: float, cache_bytes: int, cache_rate: float
) -> tuple[float, float, float]:
    """Share of the peak, half size and fixed seconds with which the roofline meets all products best, in ratios."""
    counts = {dtype: sum(p.dtype == dtype for p in machine.products) for dtype in peaks}
    used = [p for p in machine.products if counts[p.dtype] > 2]
    if len(used) < 4:
        return 1.0, 0.0, 0.0
    flops = np.array([p.flops for p in used])
    least = np.array([min(p.m, p.k, p.n) for p in used], float)
    peak = np.array([peaks[p.dtype] for p in used])
    seconds = np.array([p.seconds for p in used])
    cached = np.minimum(1.0, cache_bytes / np.array([p.bytes for p in used]))
    moving = np.array([p.bytes for p in used]) * (cached / cache_rate + (1 - cached) / memory)

    def residual(x: np.ndarray) -> np.ndarray:
        share, half, fixed = x[0], 100 * x[1], 1e-6 * x[2]
        said = machine.kernel_seconds + fixed + np.maximum(flops / (peak * share) * (1 + half / least), moving)
        return np.log(said / seconds)

    bounds = ([LEAST_SHARE, 0.0, 0.0], [1.0, 100.0, 1000.0])
    share, half, fixed = least_squares(residual, x0=[0.9, 0.1, 1.0], bounds=bounds, loss="soft_l1", f_scale=0.1).x
    return float(share), float(100 * half), float(1e-6 * fixed)


def fit_elements(hardware: Hardware, elements: Sequence[ElementTime]) -> dict[str, float]:
    """Elements per second of those kernels that are slower than their bytes."""

    found = {}
    for e in elements:
        said = seconds_of_work(hardware, Work("elements", e.name, bytes=e.bytes, elements=e.elements))
        if e.seconds > WORTH_STATING * said:
            found[e.name] = _rounded(e.elements / e.seconds)
    return found


def _peaks(products: Sequence[ProductTime]) -> dict[str, float]:
    return {
        d: max(p.flops / p.seconds for p in products if p.dtype == d) for d in dict.fromkeys(p.dtype for p in products)
    }


def _share(value: float) -> float:
    return _rounded(min(1.0, max(LEAST_SHARE, value)))


def _rounded(value: Any) -> Any:
    """Four significant digits: no more is known."""
    if value is None or value == 0:
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
