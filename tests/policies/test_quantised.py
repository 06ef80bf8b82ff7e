"""Adapters on quantised weights get the gradients of plain training, bit for bit, under every choice."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, choice_kinds, parse_choice
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build, discover_units
from tests.errors import raises
from tests.policies.zoo import KINDS, assert_equal
from tests.tuning.small import TWO_LAYERS

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
BASES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "dtype": "bf16"},
    "int8": {"quantization": {"load_in_8bit": True}},
    "fp4, DoRA": {
        "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "lora": LORA | {"use_dora": True},
    },
}


def workload_of(base: str) -> Step:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    spec = WorkloadSpec.model_validate(
        {"model": TWO_LAYERS, "lora": LORA, "batch_size": 2, "seq_len": 16} | BASES[base]
    )
    workload = build(spec)
    with torch.no_grad():  # factors that are zero would hide what comes before them
        for name, parameter in workload.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return workload


def gradients(workload: Step, choices: Mapping[str, Choice] | None = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    found: dict[str, Tensor] = {}
    with attach(workload.model, dict(choices or {})):
        for i in range(3):  # a unit's first calls look at its state
            found[f"{i} loss"] = workload.forward_backward()
            for name, parameter in workload.model.named_parameters():
                if parameter.grad is not None:
                    found[f"{i} {name}"] = parameter.grad.clone()
            assert workload.optimizer is not None
            workload.optimizer.step()
            workload.release_gradients()
    return found


@pytest.fixture(scope="module", params=BASES)
def base(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor]]:
    return request.param, gradients(workload_of(request.param))


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice(base: tuple[str, dict[str, Tensor]], kind: str) -> None:
    """All of them with the usual base, and with each of the others every second."""
    if base[0] != "nf4" and KINDS.index(kind) % 2 != (base[0] == "int8") and kind != "remake":
        pytest.skip("with the other base")
    workload = workload_of(base[0])
    blocks = [unit.name for unit in discover_units(workload.model) if unit.role == "block"]
    choices = {name: parse_choice(kind) for name in blocks}
    if (base[0], kind) == ("int8", "remake"):
        with raises(ConflictError, "MatMul8bitFp"):
            gradients(workload, choices)
        return
    got = gradients(workload, choices)
    assert any("lora_A" in name and grad.any() for name, grad in got.items())
    assert_equal(got, base[1])


@pytest.mark.parametrize("kind", sorted(choice_kinds("head")))
def test_every_choice_for_the_head(base: tuple[str, dict[str, Tensor]], kind: str) -> None:
    choice = parse_choice(kind)
    got = gradients(workload_of(base[0]), {"lm_head": choice})
    if getattr(choice, "exact", True) and kind != "chunked_loss":
        assert_equal(got, base[1])
