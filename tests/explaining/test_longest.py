"""The longest sequences that fit a budget."""

from __future__ import annotations

import pytest

from autockpt.errors import InfeasibleError, UsageError
from autockpt.explaining import limits
from autockpt.explaining.limits import with_longest
from autockpt.schema import WorkloadSpec, parse_budget
from autockpt.schema.choices import RECOMPUTE
from autockpt.schema.explanation import Largest
from autockpt.tracing import Tracer

SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)


def test_shares_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="share of this job"):
        with_longest(SPEC, parse_budget("60%"))


@pytest.mark.slow
def test_twice_what_is_found_does_not_fit(few_choices: None) -> None:
    budget = parse_budget("40MB")
    found, note = with_longest(SPEC, budget, device="cpu")
    assert found.seq_len is not None and found.seq_len > 64 and f"{found.seq_len:,} tokens" in note
    with Tracer.from_spec(SPEC.model_copy(update={"seq_len": 2 * found.seq_len})) as tracer:
        units = [unit.name for unit in tracer.units if unit.role == "block"]
        peak = tracer.trace(dict.fromkeys(units, RECOMPUTE)).peak_bytes
    assert budget.size is not None and peak > budget.size


def test_where_no_length_fits_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Largest(dimension="sequence length", plan="leanest", value=None, now=64)
    monkeypatch.setattr(limits, "_with_leanest", lambda *asked: row)
    with pytest.raises(InfeasibleError, match="shortest"):
        with_longest(SPEC, parse_budget("2MB"), device="cpu")
    own = row.model_copy(update={"why": "a factory makes its own batch"})
    monkeypatch.setattr(limits, "_with_leanest", lambda *asked: own)
    with pytest.raises(UsageError, match="a factory makes its own batch"):
        with_longest(SPEC, parse_budget("2MB"), device="cpu")


def test_it_is_asked_again_at_what_was_found_as_another_plan_may_be_the_leanest_there(monkeypatch) -> None:
    """At short sequences the optimizer sets the peak, and every plan seems as lean as any other."""
    asked: list[int | None] = []

    def found(question, dimension, listener) -> Largest:
        asked.append(now := question.spec.seq_len)
        value = {64: 1_000, 1_000: 4_000, 4_000: 4_032}[now]
        return Largest(dimension=dimension, plan="leanest", value=value, peak_bytes=1 << 20, now=now)

    monkeypatch.setattr(limits, "_with_leanest", found)
    spec, note = with_longest(SPEC, parse_budget("40MB"), device="cpu")
    assert spec.seq_len == 4_032 and asked == [64, 1_000, 4_000] and "4,032 tokens" in note
