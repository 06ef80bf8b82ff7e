"""Every caller gets the same request from the same words, or an error before anything runs."""

from typing import Any

import pytest
import torch
from torch import nn

from autockpt.errors import UsageError
from autockpt.schema import SearchRequest, WorkloadSpec
from autockpt.tuning import answer, entry, search_request
from autockpt.tuning.loop import Proposer
from autockpt.tuning.targets.base import Target
from autockpt.workload import Step

SPEC = WorkloadSpec(model="llama-tiny", seq_len=64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_batch": 0},
        {"global_batch": 8, "lengths": "512:3"},
        {"longest": True, "lengths": "512:3"},
        {"host_budget": 0},
        {"trials": 0},
        {"no_option": 1},
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        search_request(budget="24GB", **wrong)
    assert caught.value.remedy and caught.value.exit_code == 2


def test_words_become_data() -> None:
    asked = search_request(budget="24GB", hardware="rtx4090", host_budget="8GB", lengths="64:1,32:2", workload=SPEC)
    assert asked.budget.size == 24 * 10**9 and asked.budget.headroom == "5%", "no card has confirmed its peaks"
    assert asked.hardware is not None and asked.hardware.name == "rtx4090" and asked.host_budget == 8 * 10**9
    assert asked.lengths is not None and asked.lengths.counts == {32: 2, 64: 1}
    assert search_request(budget="24GB", global_batch=8, workload=SPEC).rows_per_update == 8
    assert search_request(budget="24GB").budget.headroom == ""


def test_a_live_step_is_a_request_like_any_other() -> None:
    step = Step(nn.Linear(2, 2), {"x": torch.ones(1, 2)}, loss=lambda model, batch: model(batch["x"]).sum())
    asked = search_request(budget="24GB", step=step)
    assert asked.step is step and asked.name == "Linear" and "step" not in asked.model_dump()


@pytest.mark.parametrize(
    ("more", "asked_of"),
    [({}, "run_search"), ({"global_batch": 8}, "search_batch_sizes"), ({"lengths": {64: 1}}, "search_lengths")],
)
def test_a_request_says_what_is_searched_for(more: Any, asked_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, SearchRequest] = {}
    for name in ("run_search", "search_batch_sizes", "search_lengths"):
        monkeypatch.setattr(entry, name, lambda request, listener, name=name: asked.setdefault(name, request))
    request = search_request(budget="24GB", workload=SPEC, **more)
    answer(request)
    assert asked == {asked_of: request}


def test_the_loop_asks_little() -> None:
    """A new target, or a new source of candidates, is a class that can be written in an afternoon."""
    members = [
        {name for name in {**vars(kind), **kind.__annotations__} if not name.startswith("_")}
        for kind in (Proposer, Target)
    ]
    assert sum(map(len, members)) <= 14, members
