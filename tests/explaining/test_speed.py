"""Where the seconds of a step go, on a small model and a described card."""

from __future__ import annotations

import pytest

from autockpt.explaining import Question, explain
from autockpt.explaining.speed import FEED_FORWARD, OPTIMIZER, SCORES
from autockpt.reporting.explain_words import bound_words, speed_words
from autockpt.schema import Plan, WorkloadSpec
from search_spaces.hardware import load_hardware

pytestmark = pytest.mark.slow

SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)


def test_parts_add_up_and_what_runs_again_is_work_but_not_the_models() -> None:
    card = load_hardware("rtx4090")
    plain = explain(Question(SPEC, hardware=card, limits=False))
    plan = Plan(choices={"model.layers.*": "recompute"})  # type: ignore[dict-item]
    again = explain(Question(SPEC, plan=plan, hardware=card, limits=False))
    assert plain.speed is not None and again.speed is not None
    assert plain.speed.flops == plain.speed.model_flops == again.speed.model_flops < again.speed.flops
    assert {SCORES, FEED_FORWARD, OPTIMIZER} <= {part.name for part in plain.speed.parts}
    whole = sum(part.seconds for part in plain.speed.parts)
    assert whole == pytest.approx(plain.speed.seconds, rel=0.02)
    assert sum(part.flops for part in again.speed.parts) == again.speed.flops
    assert 0 < again.speed.average_bytes <= again.peak_bytes
    assert plain.speed.utilisation is not None and 0 < plain.speed.utilisation < 1
    assert {part.bound for part in plain.speed.parts if part.name != OPTIMIZER} == {"launches"}, "so small a model"
    assert "torch.compile" in " ".join(bound_words(plain.speed))
    assert "tokens/s" in speed_words(plain)
