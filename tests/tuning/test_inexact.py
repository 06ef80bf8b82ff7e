"""Where the logits are what does not fit: chunked_loss only if it is allowed, else named as the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from autockpt.errors import HostBudgetExceeded, InfeasibleError, UsageError
from autockpt.profiling import uniform_graphs
from autockpt.runtime import apply
from autockpt.schema import Plan, SearchRequest, WorkloadSpec, load_space, parse_budget
from autockpt.schema.choices import OFFLOAD, ChunkedLoss
from autockpt.tracing import Tracer
from autockpt.tuning import run_search, search
from autockpt.tuning.inexact import CHUNKS, chunk_size

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
    assert outcome.plan is not None
    head = outcome.plan.choices["lm_head"]
    assert isinstance(head, ChunkedLoss)
    assert any("chunked_loss" in note and "up to rounding" in note for note in outcome.notes)
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.status == "simulated" and loaded.predicted is not None and loaded.predicted.peak_bytes <= 250_000_000


def test_where_it_changes_nothing_plans_stay_exact(request_: SearchRequest) -> None:
    spec = WorkloadSpec(model="vit-tiny")
    asked = request_.model_copy(update={"allow_inexact": True, "workload": spec, "budget": parse_budget("90%")})
    outcome = run_search(asked)
    assert outcome.plan is not None and all(choice.exact for choice in outcome.plan.choices.values())
    assert any("no output head" in note for note in outcome.notes)


def test_the_size_of_a_chunk_is_the_largest_that_costs_no_memory(tmp_path: Path) -> None:
    def chosen(vocabulary: int) -> tuple[int, dict[int, int]]:
        config = transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
        )
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(tmp_path / str(vocabulary))
        spec = WorkloadSpec(model=str(tmp_path / str(vocabulary)), batch_size=32, seq_len=64)
        with Tracer.from_spec(spec, fallback=False) as tracer:
            blocks = [u for u in tracer.units if u.role == "block"]
            uniform = uniform_graphs(tracer, blocks, ("save", "recompute"))
            size = chunk_size(tracer, "lm_head", uniform).tokens
            plans = {n: {**uniform["recompute"][0], "lm_head": ChunkedLoss(tokens=n)} for n in CHUNKS}
            return size, {n: tracer.trace(plan).peak_bytes for n, plan in plans.items()}

    for vocabulary in (16, 8192):
        size, peaks = chosen(vocabulary)
        least = min(peaks.values())
        assert size == max(n for n, peak in peaks.items() if peak <= 1.01 * least)
        assert (size == CHUNKS[-1]) == (vocabulary == 16)


class Live:
    """A live model whose logits are most of what it needs."""

    def __init__(self) -> None:
        config = transformers.LlamaConfig(
            vocab_size=2048, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(config)
        ids = torch.randint(0, 2048, (16, 64))
        self.batch = {"input_ids": ids, "labels": ids}


def test_a_live_search_names_the_way_out_and_takes_it() -> None:
    live = Live()
    space = load_space("knobs").restricted(("recompute",))
    asked = {"budget": "16MB", "space": space, "trials": 3}
    with pytest.raises(InfeasibleError) as caught:
        search(live.model, live.batch, **asked)
    assert "Or add allow_inexact=True" in caught.value.remedy
    before = {name: tensor.clone() for name, tensor in live.model.state_dict().items()}
    plan = search(live.model, live.batch, allow_inexact=True, **asked)
    assert isinstance(plan.choices["lm_head"], ChunkedLoss)
    assert plan.measured is not None and plan.measured.peak_bytes <= 16_000_000
    assert all(torch.equal(tensor, before[name]) for name, tensor in live.model.state_dict().items())
    with apply(live.model, plan) as handle:
        assert "up to rounding" in handle.attached["lm_head"]
        live.model(**live.batch).loss.backward()


def test_a_live_search_stays_within_its_host_budget() -> None:
    live = Live()
    space = load_space("knobs").restricted(("offload",))
    plan = search(live.model, live.batch, budget="90%act", space=space, trials=3, host_budget="200KB")
    assert plan.host_budget_bytes == 200_000
    assert plan.measured is not None and plan.measured.host_bytes <= 200_000
    offloaded = next(row for row in plan.baselines if row.name == "offload all")
    assert offloaded.measured is None and "host budget" in offloaded.note
    with pytest.raises(UsageError, match="allows nothing"):
        search(live.model, live.batch, budget="90%", host_budget=0)
    every = plan.model_copy(update={"choices": {"**": OFFLOAD}})
    with apply(live.model, every), pytest.raises(HostBudgetExceeded):
        live.model(**live.batch).loss.backward()
