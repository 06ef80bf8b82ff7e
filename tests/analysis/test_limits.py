from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autockpt import estimate, explain
from autockpt.analysis import limits as limits_module
from autockpt.analysis.limits import FIELDS, MOST_RUNS, Lean, Needed, grain, largest, step_of, with_longest
from autockpt.errors import InfeasibleError, UsageError, WorkloadError
from autockpt.schema import WorkloadSpec, parse_budget
from autockpt.schema.choices import RECOMPUTE
from autockpt.schema.explanation import Largest
from autockpt.tracing import Tracer
from autockpt.tuning.jobs import resized
from autockpt.workload import Step, nested_tensors
from tests.policies.zoo import CASES

LLAMA = CASES["llama"]
SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)
FRAMES = """
import torch
from torch import nn

def loss(model, batch):
    return model(batch["frames"]).square().mean()

def make(seq_len=32):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    return layers, {"frames": torch.ones(2, seq_len, 16)}, loss
"""
PLANS = ("save everything", "leanest")


def limits(
    save: Callable[[int], int],
    lean: Callable[[int], int],
    now: int,
    budget_bytes: int,
    floor: int = 0,
    save_least: Callable[[int], int] | None = None,
) -> tuple[Largest, Largest, list[tuple[str, int]]]:
    """The largest sizes of two plans, and what was asked for them. By default they need no more than the least."""
    grow = dict(zip(PLANS, (save, lean), strict=True))
    least = grow | ({PLANS[0]: save_least} if save_least is not None else {})
    asked: list[tuple[str, int]] = []

    def needed(plan: str, size: int) -> Needed:
        return Needed(grow[plan](size), least[plan](size))

    def peak(plan: str, size: int) -> Needed:
        asked.append((plan, size))
        return needed(plan, size)

    first = {plan: needed(plan, now) for plan in PLANS}
    save_all, leanest = largest(peak, first, budget_bytes, "batch size", now, floor)
    assert (save_all.plan, leanest.plan) == PLANS
    return save_all, leanest, asked


@given(
    base=st.integers(0, 10**6),
    slope=st.integers(1, 10**5),
    bend=st.integers(0, 50),
    now=st.integers(1, 64),
    budget_bytes=st.integers(1, 10**8),
    floor=st.integers(0, 10**6),
)
def test_the_largest_that_fits_of_any_convex_growth(
    base: int, slope: int, bend: int, now: int, budget_bytes: int, floor: int
) -> None:
    def grows(size: int) -> int:
        return base + slope * size + bend * size * size

    found, _, asked = limits(grows, grows, now, budget_bytes, min(floor, base))
    assert len(asked) == len(set(asked)) <= 2 * (MOST_RUNS - 1) and all(size != now for _, size in asked)
    if found.value is not None:
        assert grows(found.value) == found.peak_bytes
        assert grows(found.value) <= budget_bytes
        if not found.open_ended:
            assert grows(found.value + 1) > budget_bytes
    elif not found.open_ended:
        assert grows(1) > budget_bytes or len(asked) == 2 * (MOST_RUNS - 1)


def test_straight_lines_take_few_ghost_runs() -> None:
    save, lean, asked = limits(lambda n: 100 + 50 * n, lambda n: 100 + 9 * n, 4, 1000, floor=90)
    assert (save.value, lean.value) == (18, 100) and not save.open_ended and not lean.open_ended
    assert len(asked) <= 4, asked


def test_peaks_that_do_not_grow_evenly_are_closed_in_on() -> None:
    def fragmented(size: int) -> int:
        return 1000 + 50 * size + 170 * (size % 4)

    save, lean, asked = limits(fragmented, lambda size: 1000 + 60 * size + size**2 // 4, 4, 10_000, floor=1200)
    assert save.value is not None and fragmented(save.value) == save.peak_bytes
    assert fragmented(save.value) <= 10_000 < fragmented(save.value + 1) and not save.open_ended
    assert lean.value == 104 and not lean.open_ended
    assert len(asked) <= 10, asked


def test_gaps_that_an_allocator_gives_back_near_the_budget_hide_no_larger_size() -> None:
    """As of a real step near its budget: cached blocks are let go, so that the peak stays at the budget for a while."""

    def held(size: int) -> int:
        return 1000 + 50 * size

    def reserved(size: int) -> int:
        return max(held(size) + 100, min(10_000, held(size) * 6 // 5))

    save, _, asked = limits(reserved, held, 4, 10_000, floor=1000, save_least=held)
    assert save.value == 178 and not save.open_ended
    assert len(asked) <= 2 * (MOST_RUNS - 1)


def test_sizes_that_the_model_refuses_end_the_search() -> None:
    def peak(plan: str, size: int) -> Needed:
        if size > 128:
            raise WorkloadError("the model has 128 positions")
        return Needed(size, size)

    save, _ = largest(peak, dict.fromkeys(PLANS, Needed(64, 64)), 10**6, "sequence length", 64)
    assert save.value == 128 and save.open_ended and "128 positions" in save.why


def test_other_sizes_that_cannot_be_asked_for_are_not_said_not_to_fit() -> None:
    """A factory makes its own batch, which does not fit."""

    def peak(plan: str, size: int) -> Needed:
        raise WorkloadError("--batch-size has no effect on train:make", remedy="Leave it out.")

    (found,) = largest(peak, {"leanest": Needed(2000, 2000)}, 1000, "batch size", 4)
    assert (found.value, found.why) == (None, "--batch-size has no effect on train:make")


def test_nothing_fits() -> None:
    save, _, _ = limits(lambda n: 10**6 + n, lambda n: 10**6 + n, 4, 10)
    assert save.value is None and save.peak_bytes is None


@pytest.mark.parametrize(("size", "step"), [(1, 1), (64, 2), (512, 16), (2048, 64), (3000, 64)])
def test_grains(size: int, step: int) -> None:
    assert grain(size) == step


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


@pytest.mark.slow
def test_a_factory_whose_batch_holds_no_token_ids_starts_from_its_own_length(
    few_choices: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "factory_of_frames.py").write_text(FRAMES)
    found, note = with_longest(WorkloadSpec(model="factory_of_frames:make"), parse_budget("4MB"), device="cpu")
    assert found.seq_len is not None and found.seq_len > 32 and f"{found.seq_len:,} tokens" in note


def test_where_no_length_fits_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Largest(dimension="sequence length", plan="leanest", value=None, now=64)
    monkeypatch.setattr(limits_module, "_with_leanest", lambda *asked: Lean(row, {}))
    with pytest.raises(InfeasibleError, match="shortest"):
        with_longest(SPEC, parse_budget("2MB"), device="cpu")
    own = row.model_copy(update={"why": "a factory makes its own batch"})
    monkeypatch.setattr(limits_module, "_with_leanest", lambda *asked: Lean(own, {}))
    with pytest.raises(UsageError, match="a factory makes its own batch"):
        with_longest(SPEC, parse_budget("2MB"), device="cpu")


def test_it_is_asked_again_at_what_was_found_as_another_plan_may_be_the_leanest_there(monkeypatch) -> None:
    """At short sequences the optimizer sets the peak, and every plan seems as lean as any other."""
    asked: list[int | None] = []

    def found(question, dimension, listener, unlike=None) -> Lean:
        asked.append(now := question.spec.seq_len)
        value = {64: 1_000, 1_000: 4_000, 4_000: 4_032}[now]
        return Lean(Largest(dimension=dimension, plan="leanest", value=value, peak_bytes=1 << 20, now=now), {})

    monkeypatch.setattr(limits_module, "_with_leanest", found)
    spec, note = with_longest(SPEC, parse_budget("40MB"), device="cpu")
    assert spec.seq_len == 4_032 and asked == [64, 1_000, 4_000] and "4,032 tokens" in note


def test_no_length_is_named_that_the_search_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that is the leanest at the length of now may fit where the one that is the leanest there does not."""

    def found(question, dimension, listener, unlike=None) -> Lean:
        value, now = {64: 1_000, 1_000: 960}[question.spec.seq_len], question.spec.seq_len
        return Lean(Largest(dimension=dimension, plan="leanest", value=value, peak_bytes=1 << 20, now=now), {})

    monkeypatch.setattr(limits_module, "_with_leanest", found)
    spec, note = with_longest(SPEC, parse_budget("40MB"), device="cpu")
    assert spec.seq_len == 960 and "960 tokens" in note


class Normed(nn.Module):
    """Rows that depend on each other, by a batch norm in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def live_step(kind: str) -> Step:
    if kind == "normed":
        batch: Any = {"x": torch.ones(40, 64)}
        return Step(Normed(), batch, loss=lambda model, batch: model(batch["x"]).square().mean())
    model = LLAMA.make()
    return Step(model, LLAMA.batch(), optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(("kind", "dimensions"), [("llama", list(FIELDS)), ("normed", ["batch size"])])
def test_a_live_step_has_a_largest_batch_and_a_longest_sequence(kind: str, dimensions: list[str]) -> None:
    """What is named fits by a ghost run of that very size, and one more does not."""
    step = live_step(kind)
    before = [tensor.clone() for tensor in nested_tensors(step.model, step.batch)]
    with Tracer.from_step(step) as tracer:
        kib = int(tracer.trace().peak_bytes * 1.7) >> 10
    found = explain(step=step, budget=f"{kib}KiB", headroom="0%", show=False)
    assert list(dict.fromkeys(limit.dimension for limit in found.limits)) == dimensions
    for limit in found.limits:
        if limit.plan != "save everything":
            continue
        assert limit.value is not None and limit.value > limit.now and not limit.open_ended
        name = FIELDS[limit.dimension]
        more = limit.value + step_of(limit.dimension, limit.value)
        for size, fits in ((limit.value, True), (more, False)):
            with Tracer.from_step(resized(step, name, size)) as tracer:
                assert tracer.settings[name] == size
                assert (tracer.trace().peak_bytes <= kib << 10) == fits, (name, size)
    assert all(map(torch.equal, nested_tensors(step.model, step.batch), before))


def test_a_live_step_is_estimated_at_other_sizes() -> None:
    step = live_step("llama")
    rows = list(estimate(step, batch_sizes=[1, 4], seq_lens=[8, 16]))
    assert [(row.batch_size, row.seq_len) for row in rows] == [(1, 8), (1, 16), (4, 8), (4, 16)]
    assert all(row.fits and row.peak_bytes and not row.note for row in rows)
    peaks = [row.peak_bytes or 0 for row in rows]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    (own,) = estimate(live_step("normed"))
    assert own.fits and own.seq_len is None
    with pytest.raises(UsageError):
        estimate(step, cards="rtx4090")


def test_a_live_step_goes_with_no_description() -> None:
    with pytest.raises(UsageError, match="hardware= does not go with a live step"):
        explain(step=live_step("normed"), hardware="rtx4090")
