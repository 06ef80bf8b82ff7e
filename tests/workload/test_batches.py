"""Batches are what a data collator would hand over, and always the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.workload.batches import IGNORE, BatchMaker
from autockpt.workload.configs import TEXT, Task


class Config(SimpleNamespace):
    def get_text_config(self) -> Config:
        return self


def make(task: Task, rows: int = 4, length: int | None = 16, **config: Any) -> Any:
    packed = config.pop("packed", False)
    seed = config.pop("seed", 0)
    maker = BatchMaker(
        config=Config(**({"model_type": "x", "vocab_size": 50, "num_labels": 3} | config)),
        rows=rows,
        length=length or 1,
        packed=packed,
        generator=torch.Generator().manual_seed(seed),
    )
    return maker.make(task, torch.float32)


@settings(max_examples=60)
@given(
    task=st.sampled_from(TEXT),
    rows=st.integers(1, 6),
    length=st.integers(1, 40),
    packed=st.booleans(),
    pad=st.none() | st.integers(0, 49),
)
def test_text(task: Task, rows: int, length: int, packed: bool, pad: int | None) -> None:
    batch = make(task, rows, length, packed=packed, pad_token_id=pad, image_token_id=7)
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == (rows, length) and ids.dtype == labels.dtype == torch.int64
    assert int(ids.min()) >= 0 and int(ids.max()) < 50
    assert ("attention_mask" in batch) == (not packed)
    mask = torch.ones_like(ids) if packed else batch["attention_mask"]
    lengths = mask.sum(1)
    assert int(lengths.max()) == length and int(lengths.min()) >= length // 2
    assert torch.equal(mask, (torch.arange(length) < lengths[:, None]).long())  # padding is on the right
    assert not ((ids == 7) & (mask == 1)).any()
    if pad is not None:
        assert not ((ids == pad) & (mask == 1)).any()
        assert (ids[mask == 0] == pad).all()
    if task in ("causal_lm", "masked_lm", "token_classification"):
        assert (labels[mask == 0] == IGNORE).all()
        assert (labels != IGNORE).any()
    if task == "causal_lm":
        assert torch.equal(labels[mask == 1], ids[mask == 1])
    if task == "seq2seq_lm":
        assert (labels.shape == ids.shape and not torch.equal(labels, ids)) or rows * length < 4


def test_seeds_decide_everything() -> None:
    state = torch.get_rng_state()
    a, b, c = (make("causal_lm", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(a["input_ids"], b["input_ids"]) and not torch.equal(a["input_ids"], c["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)
