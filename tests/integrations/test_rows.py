"""Which rows of a data set make its largest batches, and that nothing of it is another afterwards."""

import functools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autockpt import Step
from autockpt.errors import UsageError
from autockpt.integrations.rows import largest_batch, lengths_here
from autockpt.schema.lengths import Lengths
from tests.errors import raises
from tests.policies.zoo import CASES


def test_lengths_are_those_of_the_data_set_as_it_is_padded():
    rows = [{"input_ids": torch.ones(n % 7 + 1, dtype=torch.long)} for n in range(20)]

    def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
        return {"input_ids": nn.functional.pad(ids, (0, -ids.shape[1] % 4))}

    def whole(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"input_ids": torch.ones(len(rows), 8, dtype=torch.long)}

    model = CASES["llama"].make()
    step = Step(model, padded(rows[:7]), loss=lambda model, batch: model(**batch).logits.sum())
    lengths, said = lengths_here("auto", step, rows, padded)
    assert lengths is not None and lengths.longest == 8 and min(lengths.counts) == 1 and "20 rows" in said
    none, said = lengths_here("auto", step, rows, whole)
    assert none is None and "every batch is padded to 8 tokens" in said
    given, _ = lengths_here(Lengths(counts={4: 3, 100: 1}), step, rows, whole)
    assert given is not None and given.counts == {4: 3, 8: 1}
    with raises(UsageError):
        lengths_here("auto", step, iter(rows), padded)


def test_the_largest_batch_is_planned_for():
    rows = [{"input_ids": torch.ones(n % 7 + 1)} for n in range(20)]

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        torch.rand(3)
        return {"input_ids": nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)}

    state = torch.get_rng_state()
    batch, source = largest_batch(collate(rows[:2]), rows, collate, 2)
    assert batch["input_ids"].shape == (2, 7) and source == "the 2 longest rows"
    torch.set_rng_state(state)
    first = {"input_ids": torch.ones(2, 9)}
    assert largest_batch(first, rows, collate, 2)[0] is first
    assert torch.equal(torch.get_rng_state(), state)
    assert largest_batch(first, iter(rows), collate, 2)[1].startswith("the first batch: rows of this data set")
    assert "ZeroDivisionError" in largest_batch(first, rows, lambda rows: 1 / 0, 2)[1]


def test_rows_are_as_long_as_their_batch_makes_them():
    """Pairs of an answer preferred and one rejected, each after the prompt: the longer one counts."""
    rows = [{"prompt": [1] * 4, "chosen": [2] * n, "rejected": [3] * (20 - n)} for n in (10, 19, 9)]
    rows += [{"prompt": [1] * 9, "chosen": [2] * 9, "rejected": [3] * 9}]  # holds most, and is no longer than others

    def pairs(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        answers = [torch.tensor(r["prompt"] + r[name]) for name in ("chosen", "rejected") for r in rows]
        return {"input_ids": nn.utils.rnn.pad_sequence(answers, batch_first=True)}

    batch, _ = largest_batch(pairs(rows[:1]), rows, pairs, 1)
    assert batch["input_ids"].shape == (2, 23)

    def two_or_more(rows: list[Any]) -> dict[str, Tensor]:
        assert len(rows) > 1
        return pairs(rows)

    batch, _ = largest_batch(pairs(rows[:1]), rows, two_or_more, 2)
    assert batch["input_ids"].shape == (4, 18), "by what they hold, where no batch of one can be made"


class Masking:
    """Draws from generators of its own, one of them made at the first call, and counts."""

    def __init__(self) -> None:
        self.python, self.array, self.old = random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1)
        self.torch: torch.Generator | None = None
        self.system = random.SystemRandom()  # has no state
        self.calls = 0

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.calls += 1
        if self.torch is None:
            self.torch = torch.Generator().manual_seed(1)
        drawn = [self.python.random(), self.array.random(), self.old.rand(), float(torch.rand(1, generator=self.torch))]
        return torch.cat([*rows, torch.tensor([*drawn, self.calls])])


class Wrapping:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def collate(self, rows: list[Tensor]) -> Tensor:
        return self.inner(rows)


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("wrapped", [lambda c: c, lambda c: Wrapping(c).collate, functools.partial(functools.partial)])
def test_a_collator_goes_on_as_if_no_batch_had_been_made(calls_before, wrapped):
    rows = [torch.ones(n) for n in (3, 5)]
    looked_at, plain = wrapped(Masking()), wrapped(Masking())
    for collate in (looked_at, plain):
        for _ in range(calls_before):
            collate(rows)
    batch, source = largest_batch(torch.ones(1), rows, looked_at, 1)
    assert len(batch) == 10 and source == "the 1 longest rows"
    assert torch.equal(looked_at(rows), plain(rows))
