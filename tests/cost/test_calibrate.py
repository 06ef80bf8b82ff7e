"""Calibration: every figure comes out, a made-up machine is found again, contradictions are not glossed over."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import date
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cost import calibrate, probes
from autockpt.cost.calibrate import Measured, Product, described, fit_traffic
from autockpt.devices import get_device
from autockpt.errors import MeasurementError, UsageError
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.hardware import dump_hardware
from autockpt.shipped import load_hardware

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
        small_link=(1.8e10, 0.5e10),
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
    assert share.link == pytest.approx(0.5) and (found.link_out, found.link_in) == (2e10, 1e10)
    assert share.attention == pytest.approx(0.7, rel=0.05)
    assert found.measured == "2026-01-02" and found.environment is not None
    assert found.description == "A CPU" and found.sources["bandwidth"].startswith("measured")


def test_only_kernels_that_bytes_do_not_explain_get_rates_of_their_own() -> None:
    assert described(machine()).element_rates == {"tanh": pytest.approx(4e8)}


def test_no_cache_where_all_sizes_are_alike() -> None:
    assert fit_traffic({2**20 * n: 3e10 for n in (1, 16, 256)}) == (3e10, 0, 3e10)


def test_too_few_products_give_no_more_than_the_peak() -> None:
    share = described(machine([product("float32", PEAK, 1024, 1024, 1024)])).efficiency
    assert (share.matrix, share.half_size, share.matrix_seconds) == (1.0, 0.0, 0.0)


def test_a_contradiction_is_an_error() -> None:
    with pytest.raises(MeasurementError, match="launch"):
        described(machine(launch_seconds=1.0))


@pytest.mark.slow
def test_a_measured_machine_becomes_a_file_that_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "LEAST_SAMPLE", 0.0)
    told: list[str] = []
    found = calibrate.measure(get_device("cpu"), SMALL, 1, told.append)
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


def test_probes_are_named_as_the_roofline_names_ops() -> None:
    names = calibrate.element_calls(torch.device("cpu"), 64, 64)
    assert all(hasattr(torch.ops.aten, name) for name in names if name != "strided_copy")


def test_tf32_is_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found = calibrate.time_product(probes.Stopwatch(torch.device("cpu"), 1), "tf32", (8, 8, 8))
    assert found.dtype == "tf32" and found.flops == 1024 and torch.backends.cuda.matmul.allow_tf32 == before


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match="no cuda device"):
        calibrate.measure_in_child("cuda", quick=True, tell=print)


def test_a_child_that_dies_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "__name__", "autockpt.nothing_of_this_name")
    with pytest.raises(MeasurementError, match="nothing_of_this_name"):
        calibrate.measure_in_child("cpu", quick=True, tell=print)


def test_an_error_in_the_child_keeps_its_class() -> None:
    ours, theirs = Pipe()
    with ours:
        ours.send({"device": "tpu", "quick": True})
        calibrate.main(os.dup(theirs.fileno()))
        error = ours.recv()["error"]
    theirs.close()
    assert isinstance(error, UsageError) and "unknown device" in error.message
