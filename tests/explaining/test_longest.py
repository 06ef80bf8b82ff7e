"""The longest sequences that fit a budget."""

from __future__ import annotations

import pytest

from autockpt.errors import InfeasibleError, UsageError
from autockpt.explaining.longest import with_longest
from autockpt.schema import WorkloadSpec, parse_budget
from autockpt.schema.choices import RECOMPUTE
from autockpt.tracing import Tracer

SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)


def test_shares_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="share of this job"):
        with_longest(SPEC, parse_budget("60%"))


@pytest.mark.slow
def test_what_is_found_fits_and_a_little_more_does_not() -> None:
    budget = parse_budget("40MB")
    found, note = with_longest(SPEC, budget, device="cpu")
    assert found.seq_len is not None and f"{found.seq_len:,} tokens" in note
    assert budget.size is not None
    for length, fits in ((found.seq_len, True), (found.seq_len * 2, False)):
        with Tracer.from_spec(SPEC.model_copy(update={"seq_len": length})) as tracer:
            units = [unit.name for unit in tracer.units if unit.role == "block"]
            peak = tracer.trace(dict.fromkeys(units, RECOMPUTE)).peak_bytes
        assert (peak <= budget.size) == fits or length == found.seq_len
    with pytest.raises(InfeasibleError, match="shortest"):
        with_longest(SPEC, parse_budget("2MB"), device="cpu")
