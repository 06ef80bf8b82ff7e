"""All stages of a pipeline at once: a plan for each, none slower than the slowest, and a cut that balances better."""

import math
from pathlib import Path

import pytest

from autockpt.errors import UsageError
from autockpt.schema import Plan, WorkloadSpec
from autockpt.schema.request import PipelineAnswer, StagePlan
from autockpt.tuning import answer, search_request
from autockpt.tuning.pipeline import balanced
from tests.errors import raises
from tests.tuning.small import llama_in


def test_layers_go_where_they_leave_the_shortest_step() -> None:
    with_head = [lambda n: n * 1.0, lambda n: n * 1.0, lambda n: n * 1.0 + 2.0]
    assert balanced(with_head, 10) == (4, 4, 2)
    full = [lambda n: n * 1.0 if n < 3 else math.inf, *with_head[1:]]
    assert balanced(full, 10) == (2, 5, 3)


def asked(model: str, stage: str, **more: object) -> PipelineAnswer:
    spec = WorkloadSpec(model=model, batch_size=2, seq_len=512, packed=True, accumulate=4, stage=stage, optimizer="sgd")
    options = {"hardware": "h100", "budget": "40GB", "trials": 1, "choices": ("recompute",), **more}
    found = answer(search_request(workload=spec, **options))
    assert isinstance(found, PipelineAnswer)
    return found


@pytest.mark.slow
def test_each_stage_gets_a_plan_and_a_better_cut_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = llama_in(tmp_path / "model", vocab_size=256000, **sizes)
    found = asked(model, "2", out=tmp_path, plan_out=tmp_path / "plan.yaml")
    assert [(stage.stage, stage.layers) for stage in found.stages] == [("0/2", 2), ("1/2", 2)]
    first, last = found.stages
    assert found.slowest is last
    assert [Plan.load(tmp_path / f"plan_{i}.yaml").hash for i in (0, 1)] == [stage.plan.hash for stage in found.stages]
    best = first.outcome.plan
    assert best is not None and best.predicted is not None
    assert first.score.peak_bytes < best.predicted.peak_bytes and seconds(first) <= seconds(last)
    assert found.faster_cut == (3, 1)
    again = asked(model, ",".join(map(str, found.faster_cut)))
    assert [stage.layers for stage in again.stages] == list(found.faster_cut)
    assert seconds(again.slowest) == pytest.approx(found.cut_seconds, rel=0.03)
    assert seconds(again.slowest) < seconds(last)


def seconds(stage: StagePlan) -> float:
    assert stage.score.step_seconds is not None
    return stage.score.step_seconds


def test_other_questions_do_not_go_with_it(tmp_path: Path) -> None:
    with raises(UsageError):
        asked(str(tmp_path), "2", global_batch=8)
