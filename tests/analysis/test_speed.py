"""Where the seconds of a step go, on a small model and a described card."""

from __future__ import annotations

import pytest

from autockpt.analysis import subject
from autockpt.analysis.explain import explain
from autockpt.analysis.speed import BETWEEN, FEED_FORWARD, OPTIMIZER, SCORES
from autockpt.analysis.subject import ExplainRequest
from autockpt.cli.explain_table import bound_words, speed_words
from autockpt.schema import Plan, WorkloadSpec
from autockpt.shipped import load_hardware, load_space
from autockpt.tuning.targets import shallow_twin

pytestmark = pytest.mark.slow

SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)


def test_parts_add_up_and_what_runs_again_is_work_but_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    card = load_hardware("rtx4090")
    few = load_space(subject.SPACE).restricted(("save", "recompute", "remake"))
    monkeypatch.setattr(subject, "load_space", lambda name: few)
    plain = explain(ExplainRequest(SPEC, hardware=card, limits=False))
    for name, value in (("DEEP", 4), ("TWIN_BLOCKS", 3)):
        monkeypatch.setattr(
            shallow_twin, name, value
        )  # from here on a model of three blocks says what choices cost in four
    plan = Plan(choices={"model.layers.0": "recompute", "model.layers.1-3": "remake"})  # type: ignore[dict-item]
    again = explain(ExplainRequest(SPEC, plan=plan, hardware=card, limits=False))
    assert plain.speed is not None and again.speed is not None
    bytes_of = [{b.choice: b.kept_bytes for f in said.fronts for b in f.bargains} for said in (plain, again)]
    assert bytes_of[0].items() <= bytes_of[1].items()
    assert plain.speed.flops == plain.speed.model_flops == again.speed.model_flops < again.speed.flops
    assert {SCORES, FEED_FORWARD, OPTIMIZER} <= {part.name for part in plain.speed.parts}
    for speed in (plain.speed, again.speed):
        assert sum(part.seconds for part in speed.parts) == pytest.approx(speed.seconds, rel=1e-6)
    assert sum(part.flops for part in again.speed.parts) == again.speed.flops
    assert all(not part.flops for part in again.speed.parts if part.name == BETWEEN)
    assert 0 < again.speed.average_bytes <= again.peak_bytes
    assert plain.speed.utilisation is not None and 0 < plain.speed.utilisation < 1
    assert {part.bound for part in plain.speed.parts if part.name != OPTIMIZER} == {"launches"}, "so small a model"
    assert "torch.compile" in " ".join(bound_words(plain.speed))
    assert "tokens/s" in speed_words(plain)
