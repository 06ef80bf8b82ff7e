"""A search for a model in which nothing repeats, from its cuts to equal gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autockpt.errors import PlanError
from autockpt.runtime import apply
from autockpt.schema import Plan, SearchRequest, SearchSpace, WorkloadSpec, parse_budget
from autockpt.shipped import load_hardware
from autockpt.tuning import run_search
from tests.errors import raises
from tests.unrepeated import one_block, unet


@pytest.mark.slow
def test_a_unet_is_cut_planned_and_trained_exactly(tmp_path: Path) -> None:
    request = SearchRequest(
        budget=parse_budget("1.9MB"),
        workload=WorkloadSpec(model="tests.unrepeated:unet"),
        space=SearchSpace().restricted(("save", "recompute", "recompute_offload")),
        hardware=load_hardware("cpu"),
        plan_out=tmp_path / "plan.yaml",
        out=tmp_path,
    )
    outcome = run_search(request)
    plan = Plan.load(tmp_path / "plan.yaml")
    assert plan.settings["units"] == "down1,down2,mid,up2,up1"
    assert plan.workload is not None and plan.workload.units == plan.settings["units"]
    assert plan.predicted is not None and plan.predicted.peak_bytes <= 1_900_000
    assert any("Nothing repeats" in note for note in outcome.notes)
    step = unet()
    torch.manual_seed(1)
    step.forward_backward()
    plain = [parameter.grad.clone() for parameter in step.model.parameters() if parameter.grad is not None]
    step.release_gradients()
    with apply(step.model, plan) as handle:
        assert any(words != "save" for words in handle.attached.values())
        torch.manual_seed(1)
        step.forward_backward()
    assert all(
        torch.equal(a, p.grad) for a, p in zip(plain, step.model.parameters(), strict=True) if p.grad is not None
    )
    with raises(PlanError):
        apply(one_block().model, plan)
