"""Calibration: every figure comes out, a made-up machine is found again, contradictions are not glossed over."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cost import calibrate, probes
from autockpt.cost.calibrate import Measured, Product, described
from autockpt.devices import get_device
from autockpt.errors import UsageError
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.hardware import dump_hardware
from autockpt.shipped import load_hardware
from autockpt.workload import build

PEAK, HALF, FIXED, BANDWIDTH, CACHE, CACHED = 1e11, 24.0, 2e-5, 2e10, 32 * 2**20, 8e10
SHAPES = [(n, n, n) for n in (64, 128, 256, 512, 1024, 4096)] + [(1024, 32, 1024), (512, 2048, 64), (4096, 128, 256)]
SMALL = replace(
    calibrate.CPU,
    squares=(32, 16, 64),
    skinny=((64, 8, 64),),
    traffic=(2**16, 2**18, 2**20),
    rows=64,
    columns=64,
    tokens=32,
    copy=2**16,
)


def rate_at(nbytes: float) -> float:
    cached = min(1.0, CACHE / nbytes)
    return 1 / (cached / CACHED + (1 - cached) / BANDWIDTH)


def product(dtype: str, peak: float, *shape: int) -> Product:
    made = Product(dtype, shape, 1.0)  # type: ignore[arg-type]
    compute = made.flops / peak * (1 + HALF / min(shape))
    return replace(made, seconds=FIXED + max(compute, made.bytes / rate_at(made.bytes)))


def machine(products: list[Product] | None = None, **figures: Any) -> Measured:
    if products is None:
        products = [product("float32", PEAK, *shape) for shape in SHAPES]
        products += [product("bfloat16", 4 * PEAK, *shape) for shape in SHAPES]
        products.append(product("float16", PEAK / 50, 256, 256, 256))
    plain = {
        "description": "A CPU",
        "kind": "cpu",
        "environment": Environment(device=DeviceInfo(kind="cpu", name="A CPU", capacity_bytes=2**35), versions={}),
        "vector_flops": PEAK / 5,
        "launch_seconds": 5e-6,
        "kernel_seconds": 0.0,
        "link_out": 2e10,
        "link_in": 1e10,
        "memory_bytes": 2**35,
        "context_bytes": 0,
    }
    return Measured(
        figures=plain | figures,
        products=products,
        attention=("float32", 0.7 * PEAK, 0.6 * PEAK),
        traffic={2**20 * n: rate_at(2**20 * n) for n in (1, 4, 16, 64, 256, 1024)},
        elements={"tanh": (2**20, 2**23, 2**20 / 4e8), "add": (2**20, 1.2e7, 1.2e7 / CACHED)},
    )


def test_a_made_up_machine_is_found_again() -> None:
    found = described(machine(), date(2026, 1, 2))
    share = found.efficiency
    assert found.matrix_flops["float32"] * share.matrix == pytest.approx(PEAK, rel=0.03)
    assert found.matrix_flops["bfloat16"] * share.matrix == pytest.approx(4 * PEAK, rel=0.05)
    assert found.matrix_flops["float16"] < PEAK / 50
    assert share.half_size == pytest.approx(HALF, rel=0.2) and share.matrix_seconds == pytest.approx(FIXED, rel=0.2)
    assert found.bandwidth == pytest.approx(BANDWIDTH, rel=0.05)
    assert found.cache_bytes == pytest.approx(CACHE, rel=0.2)
    assert found.cache_bandwidth == pytest.approx(CACHED, rel=0.05)
    assert (found.link_out, found.link_in) == (2e10, 1e10)
    assert share.attention == pytest.approx(0.7, rel=0.05)
    assert found.measured == "2026-01-02" and found.environment is not None
    assert found.description == "A CPU"


@pytest.mark.slow
def test_a_measured_machine_becomes_a_file_that_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "LEAST_SAMPLE", 0.0)
    told: list[str] = []
    found = calibrate.measure(get_device("cpu"), SMALL, 1, told.append, build(calibrate.TINY))
    assert "matrix products" in told and "launch overhead" in told
    assert {p.dtype for p in found.products} == {"float32", "bfloat16", "float16"}
    assert all(p.seconds > 0 for p in found.products) and all(e[2] > 0 for e in found.elements.values())
    assert {"tanh", "_softmax", "native_layer_norm", "embedding", "bernoulli_", "strided_copy"} <= set(found.elements)
    figures = found.figures
    assert figures["region_seconds"] >= 0 and figures["launch_seconds"] > 0
    assert figures["link_out"] > 0 and figures["memory_bytes"] > 2**28
    # so few and so small samples may contradict one another; these are not what is tested here
    sane = replace(
        found,
        figures={**figures, "launch_seconds": 5e-6, "vector_flops": 1e9},
        products=[replace(p, seconds=p.flops / 1e10) for p in found.products if p.dtype == "float32"],
    )
    path = tmp_path / "here.yaml"
    path.write_text(dump_hardware(described(sane)))
    assert load_hardware(path).kind == "cpu"


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError):
        calibrate.measure_in_child("cuda", quick=True, tell=print)
