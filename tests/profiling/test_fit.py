"""A description fitted to measurements: a made-up machine is found again, contradictions are not glossed over."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from pydantic import ValidationError

from autockpt.profiling.fit import fit_hardware, fit_traffic
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.machine import ElementTime, Links, Machine, ProductTime, Traffic

PEAK, HALF, FIXED, BANDWIDTH, CACHE, CACHED = 1e11, 24.0, 2e-5, 2e10, 32 * 2**20, 8e10
SHAPES = [(n, n, n) for n in (64, 128, 256, 512, 1024, 4096)] + [(1024, 32, 1024), (512, 2048, 64), (4096, 128, 256)]


def rate_at(nbytes: float) -> float:
    cached = min(1.0, CACHE / nbytes)
    return 1 / (cached / CACHED + (1 - cached) / BANDWIDTH)


def product(dtype: str, peak: float, m: int, k: int, n: int) -> ProductTime:
    made = ProductTime(dtype=dtype, m=m, k=k, n=n, seconds=1.0)
    compute = made.flops / peak * (1 + HALF / min(m, k, n))
    return made.model_copy(update={"seconds": FIXED + max(compute, made.bytes / rate_at(made.bytes))})


def machine(**changes: Any) -> Machine:
    products = [product("float32", PEAK, *shape) for shape in SHAPES]
    products += [product("bfloat16", 4 * PEAK, *shape) for shape in SHAPES]
    products.append(product("float16", PEAK / 50, 256, 256, 256))
    sizes = [2**20 * n for n in (1, 4, 16, 64, 256, 1024)]
    plain = {
        "kind": "cpu",
        "environment": Environment(device=DeviceInfo(kind="cpu", name="A CPU", capacity_bytes=2**35), versions={}),
        "products": products,
        "attention_flops": 0.7 * PEAK,
        "attention_backward_flops": 0.6 * PEAK,
        "attention_dtype": "float32",
        "vector_flops": PEAK / 5,
        "traffic": [Traffic(bytes=n, rate=rate_at(n)) for n in sizes],
        "elements": [
            ElementTime(name="tanh", elements=2**20, bytes=2**23, seconds=2**20 / 4e8),
            ElementTime(name="add", elements=2**20, bytes=1.2e7, seconds=1.2e7 / CACHED),
        ],
        "launch_seconds": 5e-6,
        "links": Links(out=2e10, back=1e10, small_out=1.8e10, small_back=0.5e10),
        "memory_bytes": 2**35,
        "context_bytes": 0,
    }
    return Machine.model_validate(plain | changes)


def test_a_made_up_machine_is_found_again() -> None:
    found = fit_hardware(machine(), "mine", day=date(2026, 1, 2))
    share = found.efficiency
    assert found.matrix_flops["float32"] * share.matrix == pytest.approx(PEAK, rel=0.03)
    assert found.matrix_flops["bfloat16"] * share.matrix == pytest.approx(4 * PEAK, rel=0.05)
    assert found.matrix_flops["float16"] < PEAK / 50
    assert share.half_size == pytest.approx(HALF, rel=0.2) and share.matrix_seconds == pytest.approx(FIXED, rel=0.2)
    assert found.bandwidth == pytest.approx(BANDWIDTH, rel=0.05)
    assert found.cache_bytes == pytest.approx(CACHE, rel=0.2) and found.cache_bandwidth == pytest.approx(
        CACHED, rel=0.05
    )
    assert share.link == pytest.approx(0.5) and (found.link_out, found.link_in) == (2e10, 1e10)
    assert share.attention == pytest.approx(0.7, rel=0.05)
    assert found.measured == "2026-01-02" and found.environment is not None
    assert found.name == "mine" and found.sources["bandwidth"].startswith("measured")


def test_only_kernels_that_bytes_do_not_explain_get_rates_of_their_own() -> None:
    assert fit_hardware(machine(), "mine").element_rates == {"tanh": pytest.approx(4e8)}


def test_no_cache_where_all_sizes_are_alike() -> None:
    flat = [Traffic(bytes=2**20 * n, rate=3e10) for n in (1, 16, 256)]
    assert fit_traffic(flat) == (3e10, 0, 3e10)


def test_too_few_products_give_no_more_than_the_peak() -> None:
    one = [product("float32", PEAK, 1024, 1024, 1024)]
    share = fit_hardware(machine(products=one), "mine").efficiency
    assert (share.matrix, share.half_size, share.matrix_seconds) == (1.0, 0.0, 0.0)


def test_a_contradiction_is_an_error() -> None:
    with pytest.raises(ValidationError, match="launch"):
        fit_hardware(machine(launch_seconds=1.0), "mine")
