"""Hardware descriptions: impossible figures are refused by name, possible ones survive a file."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autockpt.cli.calibrate import dump_hardware
from autockpt.errors import UsageError
from autockpt.schema.hardware import Hardware
from autockpt.schema.yaml import parse

GOOD: dict[str, Any] = {
    "kind": "cuda",
    "memory_bytes": "24GiB",
    "context_bytes": "450MiB",
    "vector_flops": 80e12,
    "matrix_flops": {"float32": 80e12, "bfloat16": 160e12},
    "bandwidth": 1e12,
    "launch_seconds": 8e-6,
    "link_out": 30e9,
    "link_in": 30e9,
    "efficiency": {"matrix": 0.8, "bandwidth": 0.9, "link": 0.8},
}


def described(**changes: Any) -> Hardware:
    return Hardware.model_validate({"name": "card"} | GOOD | changes)


def test_sizes_may_carry_their_unit() -> None:
    assert described().memory_bytes == 24 * 2**30
    assert described(memory_bytes=24_000_000_000).memory_bytes == 24_000_000_000


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({"bandwidth": 900}, "bandwidth"),
        ({"bandwidth": float("nan")}, "bandwidth"),
        ({"link_in": 2e12}, "bandwidth"),
        ({"matrix_flops": {"float32": 1e12}}, "matrix_flops"),
        ({"matrix_flops": {"float32": 80e12, "bf16": 1e14}}, "bf16"),
        ({"efficiency": {"matrix": 1.2, "bandwidth": 0.9, "link": 0.8}}, "efficiency.matrix"),
        ({"launch_seconds": 8}, "launch_seconds"),
        ({"memory_bytes": "24"}, "memory_bytes"),
        ({"context_bytes": "30GiB"}, "context_bytes"),
        ({"element_rates": {"tanh": 0}}, "element_rates"),
        ({"capability": [89, 0]}, "capability"),
        ({"kind": "tpu"}, "kind"),
    ],
)
def test_impossible_figures_are_named(changes: dict[str, Any], figure: str) -> None:
    document = parse(yaml.safe_dump(GOOD | changes), "card.yaml")
    with pytest.raises(UsageError) as caught:
        document.validate(Hardware, name="card")
    assert figure in caught.value.message and caught.value.remedy


rates = st.floats(1e9, 1e14)


@pytest.mark.slow
@given(
    vector=rates,
    factor=st.floats(1, 100),
    bandwidth=st.floats(1e11, 1e13),
    share=st.floats(0.01, 1),
    launch=st.floats(1e-8, 1e-2),
)
def test_a_file_gives_back_what_was_written(
    vector: float, factor: float, bandwidth: float, share: float, launch: float
) -> None:
    before = described(
        vector_flops=vector,
        matrix_flops={"float32": vector * factor},
        bandwidth=bandwidth,
        launch_seconds=launch,
        context_bytes=0,
        efficiency={"matrix": share, "bandwidth": share, "link": share},
    )
    document = parse(dump_hardware(before), "card.yaml")
    assert document.validate(Hardware, name="card") == before


@given(value=st.floats())
def test_no_number_gets_past_as_a_bandwidth_that_none_has(value: float) -> None:
    try:
        assert 1e9 <= described(bandwidth=value, link_out=1e8, link_in=1e8).bandwidth <= 1e15
    except ValueError as error:
        assert "bandwidth" in str(error)
