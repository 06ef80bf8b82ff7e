"""Where logits are what does not fit: softmax in chunks; chunked_loss only if allowed, else named as an alternative."""

from pathlib import Path

import pytest
import torch

from autockpt.errors import HostBudgetExceeded, InfeasibleError, UsageError
from autockpt.runtime import apply
from autockpt.schema import SearchRequest, SearchSpace, WorkloadSpec, parse_budget
from autockpt.schema.choices import CHUNKED_SOFTMAX, OFFLOAD, ChunkedLoss
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.tuning import run_search, search_request
from autockpt.tuning.infeasible import INEXACT
from autockpt.workload import Step
from tests.errors import raises
from tests.tuning.small import LOGITS, fewer_alternatives, live, llama_in

pytestmark = pytest.mark.slow

CPU = load_hardware("cpu")


@pytest.fixture
def request_() -> SearchRequest:
    spec = WorkloadSpec(model=LOGITS, batch_size=32, seq_len=128)
    space = SearchSpace().restricted(("recompute",))
    return SearchRequest(budget=parse_budget("250MB"), workload=spec, space=space, hardware=CPU)


@pytest.fixture
def heavy(request_: SearchRequest) -> SearchRequest:
    """Logits are most of what it needs; softmax in chunks may be used."""
    space = SearchSpace().restricted(("recompute", "chunked_softmax"))
    return request_.model_copy(update={"space": space})


def test_softmax_runs_in_chunks_where_the_budget_asks_for_it(heavy: SearchRequest) -> None:
    outcome = run_search(heavy.model_copy(update={"budget": parse_budget("70%")}))
    assert outcome.plan is not None and outcome.plan.choices["lm_head"] == CHUNKED_SOFTMAX
    assert any("chunked_softmax" in note and "bit-equal" in note for note in outcome.notes)
    rows = {row.name: row.predicted for row in outcome.rows if row.predicted is not None}
    with Tracer.from_spec(heavy.workload) as tracer:
        plain = tracer.trace().peak_bytes + heavy.hardware.context_bytes
    # baselines are what people know, and a share of the budget is meant of them
    assert rows["none"].peak_bytes == plain and outcome.budget.bytes == int(0.7 * plain)
    assert rows["ours"].peak_bytes <= outcome.budget.bytes < rows["recompute all"].peak_bytes


@pytest.mark.parametrize("why", ["everything fits", "not among the choices"])
def test_the_head_stays_as_it_is(heavy: SearchRequest, request_: SearchRequest, why: str) -> None:
    asked = heavy if why == "everything fits" else request_
    budget = "100%" if why == "everything fits" else "98%"
    outcome = run_search(asked.model_copy(update={"budget": parse_budget(budget)}))
    assert outcome.plan is not None and "lm_head" not in outcome.plan.choices
    assert not any("chunked" in note for note in outcome.notes)


def test_measured_it_holds_the_budget_with_plain_plans_beside_it(heavy: SearchRequest, tmp_path: Path) -> None:
    spec = heavy.workload.model_copy(update={"batch_size": 8, "seq_len": 64, "optimizer": "none"})
    changes = {
        "budget": parse_budget("60%"),
        "workload": spec,
        "trials": 1,
        "out": tmp_path,
        "hardware": None,
        "device": "cpu",
    }
    outcome = run_search(heavy.model_copy(update=changes))
    plan = outcome.plan
    assert plan is not None and plan.choices["lm_head"] == CHUNKED_SOFTMAX
    assert plan.measured is not None and plan.predicted is not None
    assert plan.measured.peak_bytes == plan.predicted.peak_bytes <= outcome.budget.bytes
    measured = {row.name: row.measured.peak_bytes for row in plan.baselines if row.measured is not None}
    assert measured["none"] > outcome.budget.bytes
    again = run_search(heavy.model_copy(update=changes | {"start": plan, "hardware": CPU, "out": None}))
    assert again.plan is not None and not any("left out" in note for note in again.notes)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    """A live model whose logits are most of what it needs."""
    sizes = {"vocab_size": 2048, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    made = live(llama_in(tmp_path / "model", **sizes), batch_size=16, seq_len=64)
    return Step(made.model, made.batch)


def test_a_live_search_names_the_alternative_and_takes_it(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_alternatives(monkeypatch)
    asked = {"budget": "16MB", "choices": ("recompute",), "trials": 1}
    with pytest.raises(InfeasibleError) as caught:
        run_search(search_request(step=step, **asked))
    assert f"{INEXACT}: fits with" in caught.value.remedy
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    outcome = run_search(search_request(step=step, allow_inexact=True, **asked))
    plan = outcome.plan
    assert plan is not None and isinstance(plan.choices["lm_head"], ChunkedLoss)
    assert any("chunked_loss" in note and "up to rounding" in note for note in outcome.notes)
    assert plan.measured is not None and plan.measured.peak_bytes <= 16_000_000
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    with apply(step.model, plan) as handle:
        assert "up to rounding" in handle.attached["lm_head"]
        step.model(**step.batch).loss.backward()


def test_a_live_search_stays_within_its_host_budget(step: Step) -> None:
    asked = search_request(budget="90%act", step=step, choices=("offload",), trials=1, host_budget="200KB")
    plan = run_search(asked).plan
    assert plan is not None and plan.host_budget_bytes == 200_000
    assert plan.measured is not None and plan.measured.host_bytes <= 200_000
    offloaded = next(row for row in plan.baselines if row.name == "offload all")
    assert offloaded.measured is None and "host budget" in offloaded.note
    with raises(UsageError):
        search_request(budget="90%", host_budget=0)
    every = plan.model_copy(update={"choices": {"**": OFFLOAD}})
    with apply(step.model, every), pytest.raises(HostBudgetExceeded):
        step.model(**step.batch).loss.backward()
