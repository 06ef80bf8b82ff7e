"""Adaptive training: leaner before the budget would break, back when there is room, between optimizer steps alone."""

import copy
import itertools
import logging
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt import Plan, apply
from autockpt.devices import MemoryReading
from autockpt.errors import UsageError
from autockpt.runtime.adaptive import PATIENCE, LearnedPeaks, leaner_choices
from autockpt.runtime.choice_sets import BatchSets
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, parse_choice
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal
from tests.runtime.test_choice_sets import batch, gradients, sets

LLAMA = CASES["llama"]
SAVES = Plan.model_validate({"choices": {"model.layers.0-2": "save"}})
MB, BASE = 10**6, 10**9


class Made:
    """Memory that a test decides about: tensors take ``per_token`` MB a token by set, above ``BASE``."""

    context_bytes = int  # none

    def __init__(self, *per_token: int) -> None:
        self.per_token, self.sets = per_token, None
        self.torn, self.free, self.base, self.peak, self.given_back = 0, 1 << 40, BASE, BASE, 0
        self.tears: int | None = None  # the set that makes the allocator give its cache back

    def step(self, tokens: int) -> None:
        assert self.sets is not None
        self.peak = max(self.peak, self.base + self.per_token[self.sets.acting] * tokens * MB)
        self.torn += self.sets.acting == self.tears

    def memory(self) -> MemoryReading:
        return MemoryReading(self.base, self.peak, self.peak, self.peak, self.torn, self.free)

    def reset_peaks(self) -> None:
        self.peak = self.base

    def release(self) -> None:
        self.peak, self.given_back = self.base, self.given_back + 1


class Training:
    """A model under an adaptive plan, on memory that is made up."""

    def __init__(self, plan: Plan, meter: Made, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules["autockpt.runtime.apply"], "metered", lambda device: meter)
        self.model, self.meter = LLAMA.make(), meter
        self.handle = apply(self.model, plan, adaptive=budget)
        assert isinstance(self.handle._session, BatchSets)
        meter.sets = self.sets = self.handle._session  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def update(self, *lengths: int) -> list[int]:
        """One optimizer step over micro-batches of one row; which set each went by."""
        went = []
        for length in lengths:
            loss = self.model(**batch(length, 1)).loss
            self.meter.step(length)
            loss.backward()
            went.append(self.sets.acting)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return went


@pytest.mark.slow
def test_it_goes_leaner_before_the_budget_and_back_later(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "autockpt")
    made = Training(SAVES, meter := Made(100, 50, 10), "4500MB", monkeypatch)
    for _ in range(2):
        assert made.update(20, 20) == [0, 0]  # 3000 of 4500
    meter.free = 3100 * MB  # another process takes the rest of the device
    assert made.update(20, 20) == [2, 2] and meter.given_back == 1  # what was never used is not tried then
    for _ in range(3):
        assert made.update(20, 20) == [1, 1]  # but what lies between two that were
    meter.free = 1 << 40
    assert made.update(20, 20) == [0, 0]
    assert [move.leaner for move in made.handle.moves] == [2, 1, 0] and made.handle.moves[0].step == 2
    said = [r.getMessage() for r in caplog.records if r.name == "autockpt"]
    assert len(said) == 3 and "are free again" in said[2]
    assert "adaptive within 4.19 GiB: 3 moves so far" in str(made.handle)


def test_it_never_moves_in_the_middle_of_an_accumulation(monkeypatch) -> None:
    made = Training(SAVES, meter := Made(100, 50, 10), "4100MB", monkeypatch)
    went = [made.update(*[30] * 4) for _ in range(5)]
    assert [set(each) for each in went] == [{0}, {2}, {1}, {1}, {1}]  # 4000, then 2500
    made.model(**batch(8, 1)).loss.backward()
    meter.torn += 1  # no optimizer steps from here on: nothing is looked at
    meter.base += 2000 * MB
    for _ in range(3):
        made.model(**batch(30, 1)).loss.backward()
    assert len(made.handle.moves) == 3 and made.sets.acting == 1


@pytest.mark.slow
def test_torn_memory_counts_and_a_set_given_up_twice_waits(monkeypatch) -> None:
    made = Training(SAVES, meter := Made(10, 10, 10), "10000MB", monkeypatch)
    meter.tears = 0  # whenever everything is saved
    went = [made.update(20)[0] for _ in range(6 * PATIENCE)]
    returned = [n for n, (one, two) in enumerate(itertools.pairwise(went)) if (one, two) == (1, 0)]
    assert len(returned) == 2 and returned[1] - returned[0] >= 2 * PATIENCE


def test_a_longer_batch_than_any_before_goes_leaner_by_itself(monkeypatch) -> None:
    made = Training(SAVES, Made(100, 50, 10), "4500MB", monkeypatch)
    made.update(20)
    made.update(20)
    assert made.update(20, 64, 20) == [0, 2, 0]  # 7400 on the line at least; what was never used is not tried on it
    assert [move.tokens for move in made.handle.moves] == [64] and "64 tokens" in str(made.handle)


def test_memory_taken_between_steps_counts_for_the_next_batch(monkeypatch) -> None:
    made = Training(SAVES, meter := Made(100, 50, 10), "4500MB", monkeypatch)
    for lengths in ((30, 10), (30, 10), (10,)):
        assert set(made.update(*lengths)) == {0}  # 4000 of 4500 at most
    meter.base += 800 * MB  # a tensor that somebody else holds
    assert made.update(10) == [0] and meter.given_back == 1  # 2800
    assert made.update(10, 30, 10) == [0, 2, 0]  # 4800 were too many: what was never used is not tried then
    meter.base -= 800 * MB
    assert made.update(10, 30, 10) == [0, 0, 0]
    assert [(move.leaner, move.tokens) for move in made.handle.moves] == [(2, 30), (0, 30)]
    assert "are free again" in str(made.handle)


def test_what_runs_between_updates_is_not_training(monkeypatch) -> None:
    made = Training(SAVES, meter := Made(100, 50, 10), "4500MB", monkeypatch)
    for _ in range(4):
        assert made.update(20, 20) == [0, 0]
        meter.peak, meter.torn = 4400 * MB, meter.torn + 1  # an evaluation
    assert not made.handle.moves


def test_sets_by_length_move_with_their_batches(monkeypatch) -> None:
    made = Training(sets(16, 64, of=(SAVE,)), Made(100, 60, 10, 10), "2500MB", monkeypatch)
    for _ in range(2):
        assert made.update(8, 30) == [0, 1]  # 2800
    assert made.update(8, 30) == [0, 3]


@pytest.mark.slow
def test_gradients_are_plain_trainings_through_all_moves(monkeypatch) -> None:
    lengths = (8, 30, 20)
    wanted = gradients(LLAMA.make(), lengths)
    made = Training(SAVES, meter := Made(100, 50, 10), "3500MB", monkeypatch)
    for update in range(6):
        found = gradients(made.model, lengths)
        assert_equal(found, wanted)
        meter.step(60 if update < 3 else 5)
        made.optimizer.step()
    assert any(move.leaner for move in made.handle.moves)


def test_removed_and_copied_it_watches_nothing(monkeypatch) -> None:
    made = Training(SAVES, Made(100, 50, 10), "4500MB", monkeypatch)
    made.update(20)
    twin = copy.deepcopy(made.model)
    twin(**batch(20, 1)).loss.backward()
    adaptive = made.sets.adaptive
    assert adaptive is not None
    made.handle.remove()
    steps = adaptive.steps
    made.optimizer.step()
    assert adaptive.steps == steps and not any("forward" in m.__dict__ for m in made.model.modules())


def test_a_cpu_tells_no_peak_and_that_is_said(caplog) -> None:
    with apply(LLAMA.make(), SAVES, adaptive=True) as handle:
        assert "adaptive does nothing" in str(handle) and handle.moves == ()
    assert any("reports no peak" in r.getMessage() for r in caplog.records)
    with raises(UsageError):
        apply(LLAMA.make(), SAVES.model_copy(update={"compile": "model"}), adaptive=True)


def test_leaner_choices_recompute_what_units_keep() -> None:
    choices: dict[str, Any] = {"a.0": SAVE, "a.0.mlp": RECOMPUTE, "a.1": parse_choice("remake"), "a.2": OFFLOAD}
    assert leaner_choices(choices) == [
        {"a.0": RECOMPUTE, "a.1": choices["a.1"], "a.2": OFFLOAD},
        {"a.0": RECOMPUTE, "a.1": RECOMPUTE, "a.2": OFFLOAD},
    ]
    assert leaner_choices({"a.0": RECOMPUTE}) == []


sizes = st.integers(1, 100_000)


@given(st.lists(sizes, min_size=1, max_size=12), sizes, st.integers(0, 10**9), st.integers(0, 10**5), st.integers(0, 9))
def test_no_batch_is_taken_for_smaller_than_it_is(seen, asked, fixed, linear, square) -> None:
    def takes(tokens: int, square: int = square) -> int:
        return fixed + linear * tokens + square * tokens * tokens

    within, beyond = LearnedPeaks(), LearnedPeaks()
    for size in sorted(seen):  # what a smaller batch takes later lowers what is kept of a larger one of its class
        within.learn(0, size, takes(size))
        beyond.learn(0, size, takes(size, 0))
    if asked <= max(seen):
        found = within.of(0, asked)
        assert found is not None and found >= takes(asked) * 0.999999
        assert within.seen(0, asked)
    elif min(seen) * 1.25 <= max(seen):
        found = beyond.of(0, asked)
        assert found is not None and found >= takes(asked, 0) * 0.999999


def test_a_set_that_was_never_used_lies_between_its_neighbours() -> None:
    peaks = LearnedPeaks()
    assert peaks.of(1, 10) is None
    peaks.learn(0, 10, 1000)
    assert peaks.of(1, 10) == 1000 and not peaks.seen(1, 10)
    peaks.learn(2, 10, 200)
    assert peaks.of(1, 10) == 800
