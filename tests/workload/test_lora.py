"""Adapters go where PEFT's users expect them, or at least somewhere useful."""

from typing import Any

import pytest
from torch import nn

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import build
from autockpt.workload.lora import adapt
from tests.errors import raises


def adapted(model: nn.Module) -> set[str]:
    return {n.split(".lora_A")[0].rpartition(".")[2] for n, p in model.named_parameters() if "lora_A" in n}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-tiny", {"q_proj", "v_proj"}),
        ("gpt2-tiny", {"c_attn"}),
        ("t5-tiny", {"q", "v"}),
        ("bert-tiny", {"query", "value"}),
        ("mixtral-tiny", {"q_proj", "v_proj"}),
    ],
)
def test_pefts_defaults_by_model_type(name: str, expected: set[str]) -> None:
    model = build(WorkloadSpec(model=name, lora=2)).model
    assert adapted(model) == expected
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())


def test_otherwise_all_linear_layers_in_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 10)

    model, _ = adapt(Model(), WorkloadSpec(model="made here", lora=2))
    assert {"up", "down"} <= adapted(model)


def test_arguments_are_pefts_own() -> None:
    lora = {"r": 2, "target_modules": ["q_proj", "up_proj"], "use_dora": True, "modules_to_save": ["lm_head"]}
    workload = build(WorkloadSpec(model="llama-tiny", lora=lora))
    trained = {name for name, p in workload.model.named_parameters() if p.requires_grad}
    assert adapted(workload.model) == {"q_proj", "up_proj"}
    assert any("lora_magnitude_vector" in name for name in trained)
    assert any("lm_head.modules_to_save" in name for name in trained)
    assert workload.settings["lora"] == 2
    experts = WorkloadSpec(model="mixtral-tiny", lora={"r": 2, "target_modules": ["w1", "w2", "w3", "q_proj"]})
    assert "q_proj" in adapted(build(experts).model)


@pytest.mark.parametrize("wrong", [{"target_modules": ["q_prj"]}, {"rank": 2}, {"r": 0}])
def test_what_peft_refuses_is_refused(wrong: dict[str, Any]) -> None:
    with raises(WorkloadError):
        build(WorkloadSpec(model="llama-tiny", lora=wrong))
