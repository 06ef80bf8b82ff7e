"""Calibration: every figure comes out, a made-up machine is found again, a missing device is an error."""

from pathlib import Path

import pytest
import torch

from autockpt.cli.calibrate import dump_hardware
from autockpt.cost import calibrate
from autockpt.cost.calibrate import Product, fit_products, fit_traffic
from autockpt.devices import get_device
from autockpt.errors import MeasurementError, UsageError
from autockpt.shipped import load_hardware
from autockpt.workload import build
from tests.errors import raises

PEAK, SHARE, HALF, FIXED, BANDWIDTH, CACHE, CACHED = 1e11, 0.8, 24.0, 2e-5, 2e10, 32 * 2**20, 8e10
SHAPES = [(n, n, n) for n in (64, 128, 256, 512, 1024, 4096)] + [(1024, 32, 1024), (512, 2048, 64), (4096, 128, 256)]


def rate_at(nbytes: float) -> float:
    cached = min(1.0, CACHE / nbytes)
    return 1 / (cached / CACHED + (1 - cached) / BANDWIDTH)


def product(dtype: str, peak: float, *shape: int) -> Product:
    made = Product(dtype, shape, 1.0)  # type: ignore[arg-type]
    compute = made.flops / (peak * SHARE) * (1 + HALF / min(shape))
    return made._replace(seconds=FIXED + max(compute, made.bytes / BANDWIDTH))


def test_a_made_up_machine_is_found_again() -> None:
    memory, cache, cached = fit_traffic({2**20 * n: rate_at(2**20 * n) for n in (1, 4, 16, 64, 256, 1024)})
    assert (memory, cache, cached) == pytest.approx((BANDWIDTH, CACHE, CACHED), rel=0.2)
    assert fit_traffic({2**20: BANDWIDTH, 2**30: BANDWIDTH}) == (BANDWIDTH, 0, BANDWIDTH)
    products = [product(dtype, peak, *s) for dtype, peak in (("float32", PEAK), ("bfloat16", 4 * PEAK)) for s in SHAPES]
    products.append(product("float16", PEAK / 50, 256, 256, 256))  # emulated: timed once
    peaks = {"float32": PEAK, "bfloat16": 4 * PEAK, "float16": PEAK / 50}
    assert fit_products(products, peaks, 0.0, memory) == pytest.approx((SHARE, HALF, FIXED), rel=0.05)
    assert fit_products(products[:3], peaks, 0.0, memory) == (1.0, 0.0, 0.0), "too few to say"
    ideal = [p._replace(seconds=p.flops / peaks[p.dtype]) for p in products]
    assert fit_products(ideal, peaks, 0.0, 1e15) == pytest.approx((1.0, 0.0, 0.0), abs=1e-6)


@pytest.mark.slow
def test_a_measured_machine_becomes_a_file_that_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "LEAST_SAMPLE", 0.0)
    told: list[str] = []
    found = calibrate.measure(get_device("cpu"), build(calibrate.TINY), told.append, 1, largest=2**20)
    assert "matrix products" in told and "launch overhead" in told
    assert set(found.matrix_flops) == {"float32", "bfloat16", "float16"} and found.region_seconds is not None
    path = tmp_path / "here.yaml"
    path.write_text(dump_hardware(found))
    loaded = load_hardware(path)
    assert loaded.kind == "cpu" and loaded.environment is not None and loaded.measured


def test_figures_that_contradict_one_another_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LEAST_SAMPLE", 0.0)
    monkeypatch.setattr(calibrate, "host_costs", lambda *asked: (1.0, 0.0))
    with raises(MeasurementError) as caught:
        calibrate.measure(get_device("cpu"), build(calibrate.TINY), print, 1, largest=2**20)
    assert "launch_seconds" in caught.value.message


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError):
        calibrate.measure_in_child("cuda", quick=True, tell=print)
