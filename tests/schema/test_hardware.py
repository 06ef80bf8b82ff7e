"""Hardware descriptions: impossible figures are refused by name, possible ones survive a file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autockpt.errors import UsageError
from autockpt.schema.hardware import Hardware, dump_hardware
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


def complaint(**changes: Any) -> str:
    """What a person reads about a file with these figures: the message with its remedy."""
    import yaml

    data = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    document = parse(yaml.safe_dump(data), "card.yaml")
    with pytest.raises(UsageError) as caught:
        document.validate(Hardware, {"name": "card"} | document.data)
    assert caught.value.remedy
    return str(caught.value)


def test_sizes_may_carry_their_unit() -> None:
    assert described().memory_bytes == 24 * 2**30
    assert described(memory_bytes=24_000_000_000).memory_bytes == 24_000_000_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bandwidth": 900}, ("bandwidth", "900e9")),
        ({"bandwidth": -1e12}, ("bandwidth", "above zero")),
        ({"bandwidth": 0}, ("bandwidth", "above zero")),
        ({"bandwidth": 1e18}, ("bandwidth", "more than any device")),
        ({"link_out": 30}, ("link_out", "30e9")),
        ({"link_in": 2e12}, ("link_in", "own memory")),
        ({"vector_flops": 80}, ("vector_flops", "80e9")),
        ({"matrix_flops": {"bfloat16": 1e14}}, ("matrix_flops", "float32 is missing")),
        ({"matrix_flops": {"float32": 1e12}}, ("matrix_flops", "below vector_flops")),
        ({"matrix_flops": {"float32": 80e12, "bfloat16": 1e12}}, ("bfloat16", "below float32")),
        ({"matrix_flops": {"float32": 80e12, "bf16": 1e14}}, ("bf16", "bfloat16")),
        ({"matrix_flops": {"float32": 0}}, ("float32", "above zero")),
        ({"efficiency": {"matrix": 1.2, "bandwidth": 0.9, "link": 0.8}}, ("efficiency.matrix", "less than or equal")),
        ({"efficiency": {"matrix": 0, "bandwidth": 0.9, "link": 0.8}}, ("efficiency.matrix", "greater than 0")),
        ({"launch_seconds": 8}, ("launch_seconds", "8e-6")),
        ({"launch_seconds": 0}, ("launch_seconds", "10 ns")),
        ({"memory_bytes": 24}, ("memory_bytes", "24GiB")),
        ({"memory_bytes": "24"}, ("memory_bytes", "24GB")),
        ({"context_bytes": "30GiB"}, ("context_bytes", "less than memory_bytes")),
        ({"cache_bytes": "32MiB", "cache_bandwidth": 5e11}, ("cache_bandwidth", "below the bandwidth")),
        ({"element_rates": {"tanh": 0}}, ("element_rates", "tanh")),
        ({"sources": {"bandwith": "x"}}, ("sources", "bandwith")),
        ({"kind": "tpu"}, ("kind", "cuda")),
        ({"bandwith": 1e12}, ("bandwith", "bandwidth")),
        ({"bandwidth": ...}, ("bandwidth", "missing")),
        ({"bandwidth": float("nan")}, ("bandwidth", "finite")),
    ],
)
def test_impossible_figures_are_named(changes: dict[str, Any], said: tuple[str, ...]) -> None:
    text = complaint(**changes)
    assert all(word in text for word in said), text
    assert "card.yaml" in text


def test_a_calibrated_file_may_be_of_any_kind_that_pytorch_has() -> None:
    here = {"device": {"kind": "npu", "name": "a card", "capacity_bytes": 2**34}, "versions": {}}
    card = described(kind="npu", environment=here)
    assert card.caches
    with pytest.raises(ValidationError, match="have to be calibrated"):
        described(kind="xpu", environment=here)


def test_a_cpu_may_emulate_16_bit_types() -> None:
    cpu = described(kind="cpu", matrix_flops={"float32": 80e12, "bfloat16": 2e12})
    assert cpu.matrix_flops["bfloat16"] == 2e12 and not cpu.caches


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
    assert document.validate(Hardware, {"name": "card"} | document.data) == before


@given(value=st.floats())
def test_no_number_gets_past_as_a_bandwidth_that_none_has(value: float) -> None:
    try:
        assert 1e9 <= described(bandwidth=value, link_out=1e8, link_in=1e8).bandwidth <= 1e15
    except ValueError as error:
        assert "bandwidth" in str(error)


def test_a_compute_capability_is_one_of_a_gpu() -> None:
    assert described(capability=[8, 9]).capability == (8, 9)
    with pytest.raises(ValidationError, match="only GPUs"):
        described(kind="cpu", capability=[8, 9])
    with pytest.raises(ValidationError, match=r"\[8, 9\]"):
        described(capability=[89, 0])


def test_a_type_may_reach_a_share_of_its_own() -> None:
    plain = described().efficiency
    own = described(efficiency=GOOD["efficiency"] | {"matrix_of": {"float32": 0.6}}).efficiency
    assert plain.of_matrix("float32") == plain.of_matrix("bfloat16") == 0.8
    assert own.of_matrix("float32") == 0.6 and own.of_matrix("bfloat16") == 0.8
    assert "int8" in complaint(efficiency=GOOD["efficiency"] | {"matrix_of": {"int8": 0.6}})
    assert "matrix_of" in complaint(efficiency=GOOD["efficiency"] | {"matrix_of": {"float32": 1.2}})
    assert "matrix_of" not in dump_hardware(described())
