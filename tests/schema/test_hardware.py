"""Hardware descriptions: impossible figures are refused by name, possible ones survive a file."""

from typing import Any

import pytest
import yaml

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


def test_a_file_gives_back_what_was_written() -> None:
    efficiency = {"matrix": 0.123456789, "bandwidth": 1, "link": 0.01}
    odd = {"bandwidth": 1.23456789e12, "launch_seconds": 1.5e-8, "context_bytes": 0, "efficiency": efficiency}
    before = Hardware.model_validate({"name": "card"} | GOOD | odd)
    assert parse(dump_hardware(before), "card.yaml").validate(Hardware, name="card") == before
