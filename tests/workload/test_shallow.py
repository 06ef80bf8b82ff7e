"""A shallow twin is the same model but for its depth."""

from __future__ import annotations

from pathlib import Path

import pytest

from autockpt.schema import WorkloadSpec
from autockpt.workload import build, discover_units
from autockpt.workload.shallow import shallow_twin


@pytest.mark.parametrize(
    ("model", "stacks", "types"), [("llama-tiny", 1, 1), ("gemma3-tiny", 1, 3), ("bert-tiny", 1, 1), ("t5-tiny", 2, 1)]
)
def test_a_twin_has_one_block_of_each_type_and_the_same_batch(
    model: str, stacks: int, types: int, tmp_path: Path
) -> None:
    """Of Gemma 3 here the third layer is the first one without a sliding window."""
    whole = build(WorkloadSpec(model=model, batch_size=2))
    twin = shallow_twin(WorkloadSpec(model=model, batch_size=2), whole.settings, 1, tmp_path)
    assert twin is not None
    small = build(twin)
    blocks, fewer = ([u for u in discover_units(w.model) if u.role == "block"] for w in (whole, small))
    assert len(fewer) == stacks * types < len(blocks)
    begins = range(0, len(blocks), len(blocks) // stacks)
    assert [u.cls for u in fewer] == [u.cls for begin in begins for u in blocks[begin : begin + types]]
    assert {k: v.shape for k, v in whole.batch.items()} == {k: v.shape for k, v in small.batch.items()}
    assert small.settings["dtype"] == whole.settings["dtype"] and type(small.model) is type(whole.model)
