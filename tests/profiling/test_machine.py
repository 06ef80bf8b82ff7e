"""Measuring a machine: every figure comes out, in a child process that dies with a clear error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autockpt.devices import get_device
from autockpt.errors import MeasurementError, UsageError
from autockpt.profiling import machine, machine_child, probes
from autockpt.profiling.fit import fit_hardware
from autockpt.schema.hardware import dump_hardware
from search_spaces.hardware import load_hardware

SMALL = replace(
    machine.SIZES["cpu", True],
    squares=(16, 32, 64),
    skinny=((64, 8, 64),),
    traffic=(2**16, 2**20),
    pool=2**21,
    rows=64,
    columns=64,
    vector=256,
    tokens=32,
    copy=2**16,
    large_copy=2**17,
    repeats=1,
)


@pytest.mark.slow
def test_a_measured_machine_becomes_a_file_that_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(machine.SIZES, ("cpu", True), SMALL)
    monkeypatch.setattr(probes, "LEAST_SAMPLE", 0.0)
    told: list[str] = []
    state = torch.random.get_rng_state()
    found = machine.measure_machine(get_device("cpu"), quick=True, tell=told.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "matrix products" in told and "launch overhead" in told
    assert {p.dtype for p in found.products} == {"float32", "bfloat16", "float16"}
    assert all(p.seconds > 0 for p in found.products) and all(e.seconds > 0 for e in found.elements)
    assert {"tanh", "_softmax", "native_layer_norm", "embedding", "bernoulli_"} <= {e.name for e in found.elements}
    assert found.region_seconds is not None and found.region_seconds >= 0
    assert found.watch_seconds is not None and found.watch_seconds >= 0
    assert found.launch_seconds > 0 and found.links.out > 0 and found.memory_bytes > 2**28
    # so few and so small samples may contradict one another; these two are not what is tested here
    sane = found.model_copy(update={"launch_seconds": 5e-6, "vector_flops": 1e9})
    sane = sane.model_copy(update={"products": tuple(p for p in sane.products if p.dtype == "float32")})
    slowest = max(p.seconds for p in sane.products)
    sane = sane.model_copy(
        update={
            "products": tuple(
                p.model_copy(update={"seconds": slowest * p.flops / 2 / 64**3 / 100}) for p in sane.products
            )
        }
    )
    path = tmp_path / "here.yaml"
    path.write_text(dump_hardware(fit_hardware(sane, "here")))
    assert load_hardware(path).kind == "cpu"


def test_probes_are_named_as_the_roofline_names_ops() -> None:
    names = probes.element_probes(torch.device("cpu"), 64, 64)
    assert all(hasattr(torch.ops.aten, name) for name in names if name != "strided_copy")


def test_tf32_is_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found = probes.time_product(probes.Stopwatch(torch.device("cpu"), 1), "tf32", 8, 8, 8)
    assert found.dtype == "tf32" and found.flops == 1024 and torch.backends.cuda.matmul.allow_tf32 == before


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match="no cuda device"):
        machine_child.measure_in_child("cuda", quick=True, tell=print)


def test_a_child_that_dies_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_child, "__name__", "autockpt.nothing_of_this_name")
    with pytest.raises(MeasurementError, match="nothing_of_this_name"):
        machine_child.measure_in_child("cpu", quick=True, tell=print)


def test_an_error_in_the_child_keeps_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os
    import sys

    reads, requests = os.pipe()
    answers, writes = os.pipe()
    os.write(requests, b'{"device": "tpu", "quick": true}\n')
    os.close(requests)
    machine_child.main(reads, writes)
    said = os.read(answers, 10000).decode()
    os.close(answers)
    assert '"UsageError"' in said and "unknown device" in said
    assert sys.modules[machine_child.__name__] is machine_child
