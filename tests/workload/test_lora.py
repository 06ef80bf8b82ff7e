"""Adapters go where PEFT's users expect them, or at least somewhere useful."""

from __future__ import annotations

import pytest
from torch import nn

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import build
from autockpt.workload.lora import add_lora
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

    model, notes = add_lora(Model(), 2)
    assert adapted(model) == {"up", "down"}
    assert "every linear layer in the blocks" in notes[0]


def test_lora_settings_are_those_asked_for_and_said() -> None:
    spec = WorkloadSpec(
        model="llama-tiny", lora=2, lora_targets="q_proj,up_proj", lora_dora=True, lora_modules_to_save="lm_head"
    )
    workload = build(spec)
    trained = {name for name, p in workload.model.named_parameters() if p.requires_grad}
    assert adapted(workload.model) == {"q_proj", "up_proj"}
    assert any("lora_magnitude_vector" in name for name in trained)
    assert any("lm_head.modules_to_save" in name for name in trained)
    assert any("DoRA of rank 2 on q_proj, up_proj" in n and "lm_head trained whole" in n for n in workload.notes)


@pytest.mark.parametrize(
    ("option", "names", "wrong", "near"),
    [
        ("lora_targets", "q_prj,v_proj", "q_prj", "q_proj"),
        ("lora_targets", "all-linear,q_proj", "all-linear", ""),
        ("lora_modules_to_save", "lm_hed", "lm_hed", "lm_head"),
    ],
)
def test_a_name_that_matches_nothing_is_told_the_nearest(option: str, names: str, wrong: str, near: str) -> None:
    with raises(WorkloadError, wrong) as caught:
        build(WorkloadSpec.model_validate({"model": "llama-tiny", "lora": 2, option: names}))
    assert (f"Did you mean {near}" in caught.value.remedy or f"{near}? " in caught.value.remedy) == bool(near)


def test_targets_may_be_ends_of_names_or_translated_ones() -> None:
    spec = WorkloadSpec(model="llama-tiny", lora=2, lora_targets="self_attn.q_proj,model.layers.0.self_attn.v_proj")
    assert adapted(build(spec).model) == {"q_proj", "v_proj"}
    experts = WorkloadSpec(model="mixtral-tiny", lora=2, lora_targets="w1,w2,w3,q_proj")
    assert "q_proj" in adapted(build(experts).model)
