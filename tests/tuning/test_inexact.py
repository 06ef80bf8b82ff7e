"""Where the logits are what does not fit: chunked_loss only if it is allowed, else named as the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from autockpt.errors import InfeasibleError
from autockpt.schema import Plan, SearchRequest, WorkloadSpec, load_space, parse_budget
from autockpt.schema.choices import CHUNKED_LOSS
from autockpt.tuning import run_search

BUDGET = "250MB"


@pytest.fixture
def request_(tmp_path: Path) -> SearchRequest:
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    spec = WorkloadSpec(model=str(tmp_path / "model"), batch_size=32, seq_len=128)
    space = load_space("knobs").restricted(("recompute",))
    return SearchRequest(budget=parse_budget(BUDGET), workload=spec, space=space, device="cpu", dry_run=True)


def test_the_way_out_is_named_with_the_smallest_peak(request_: SearchRequest) -> None:
    with pytest.raises(InfeasibleError, match="nothing fits") as caught:
        run_search(request_)
    way = next(way for way in caught.value.ways if way.options == "--allow-inexact")
    assert way.peak_bytes <= 250_000_000 and "up to rounding" in way.effect and "--allow-inexact" in caught.value.remedy


def test_allowed_it_is_part_of_the_plan_and_said_so(request_: SearchRequest, tmp_path: Path) -> None:
    asked = request_.model_copy(update={"allow_inexact": True, "plan_out": tmp_path / "plan.yaml"})
    outcome = run_search(asked)
    assert outcome.plan is not None and outcome.plan.choices["lm_head"] == CHUNKED_LOSS
    assert any("chunked_loss" in note and "up to rounding" in note for note in outcome.notes)
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.status == "simulated" and loaded.predicted is not None and loaded.predicted.peak_bytes <= 250_000_000


def test_where_it_changes_nothing_plans_stay_exact(request_: SearchRequest) -> None:
    spec = WorkloadSpec(model="vit-tiny")
    asked = request_.model_copy(update={"allow_inexact": True, "workload": spec, "budget": parse_budget("90%")})
    outcome = run_search(asked)
    assert outcome.plan is not None and all(choice.exact for choice in outcome.plan.choices.values())
    assert any("no output head" in note for note in outcome.notes)
