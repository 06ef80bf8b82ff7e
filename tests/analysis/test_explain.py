"""Whole explanations of a small real model."""

from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.analysis.explain import explain
from autockpt.analysis.holdings import COME_AND_GO
from autockpt.analysis.why import PredictedPlans, searched
from autockpt.cost import CostModel
from autockpt.schema import Plan, SearchRequest
from autockpt.tuning.targets.simulated import Simulated
from autockpt.tuning.trials import Trials
from tests.tuning.small import TWO_LAYERS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_choices")]

JOB = {"model": TWO_LAYERS, "batch_size": 2, "seq_len": 32}


def test_a_budget() -> None:
    said = explain(None, JOB, budget="50%act")
    assert said.fits and said.budget is not None and said.smallest_peak <= said.peak_bytes <= said.budget.bytes
    assert sum(h.peak_bytes for h in said.holdings) == said.peak_bytes
    assert max(said.curve.total) == said.peak_bytes
    front, head = said.fronts
    assert head.units == "lm_head" and {str(b.choice) for b in head.bargains} <= {"save", "chunked_softmax"}
    assert sum(b.taken for b in front.bargains) == front.count == len(said.choices)
    assert said.why is not None and said.why.chosen.peak_bytes == said.peak_bytes and said.why.best is None
    assert any(step.ours for step in said.budgets)
    assert said.model_validate_json(said.model_dump_json()) == said


def test_the_peak_is_that_which_the_search_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_more(request: SearchRequest, cost_model: CostModel, target: Simulated) -> tuple[PredictedPlans, Trials]:
        found, predictor = searched(request, cost_model, target), cost_model.predictor
        predictor.memory = replace(predictor.memory, context_bytes=predictor.memory.context_bytes + 10**6)
        return found

    monkeypatch.setattr("autockpt.analysis.explain.searched", keeps_more)
    said = explain(None, JOB, budget="50%act")
    assert said.fits and said.why is not None and said.peak_bytes == said.why.chosen.peak_bytes
    assert sum(h.peak_bytes for h in said.holdings) == said.peak_bytes


def test_a_plan_by_hand_with_a_head_and_an_impossible_budget() -> None:
    choices = {"model.layers.0": "recompute", "model.layers.1.mlp": "recompute", "lm_head": "chunked_loss"}
    said = explain(Plan(choices=choices), JOB, budget="1MB")
    assert said.status == "unmeasured" and not said.fits
    assert str(said.choices["lm_head"]).startswith("chunked_loss")
    assert said.smallest_peak > 10**6 and said.budgets[-1].reach is None
    assert sum(h.peak_bytes for h in said.holdings) == said.peak_bytes


def test_a_peak_in_the_optimizer_is_said_beside_activations() -> None:
    said = explain(None, JOB | {"batch_size": 1, "seq_len": 8})
    assert said.curve.peak_phase == "optimizer" and said.moment.op != said.curve.peak_op
    most = sum(h.most_bytes for h in said.holdings if h.name in COME_AND_GO)
    shown = sum(s.total for s in said.units)
    assert 0 < shown <= most
    assert not any(h.peak_bytes for h in said.holdings if h.name in COME_AND_GO)


def test_plain_training_has_no_speed_at_nominal_rates(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path))
    said = explain(None, JOB)
    assert said.speed is None
    assert said.budget is None and said.peak_bytes == said.save_all_peak
    assert said.why is not None and said.why.faster is None and said.why.leaner is not None


def test_what_a_search_leaves_out_is_left_out_here_too() -> None:
    """Offloading where host and device share their memory; and a budget above what the device has is what it has."""
    said = explain(None, JOB, hardware="m4-max", budget="999GB")
    assert not {b.choice.kind for front in said.fronts for b in front.bargains} & {"offload", "recompute_offload"}
    assert sum("share their memory" in note or "less than the budget" in note for note in said.notes) == 2
    assert said.budget is not None and said.budget.bytes < 10**12 / 2
