from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autockpt import estimate, explain
from autockpt.analysis.limits import FIELDS, MOST_RUNS, Needed, largest, step_of, with_longest
from autockpt.errors import UsageError, WorkloadError
from autockpt.schema import WorkloadSpec, parse_budget
from autockpt.schema.choices import RECOMPUTE
from autockpt.schema.explanation import Largest
from autockpt.tracing import Tracer
from autockpt.tuning.jobs import resized
from autockpt.workload import Step, nested_tensors
from tests.policies.zoo import CASES

LLAMA = CASES["llama"]
SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)
PLANS = ("save everything", "leanest")


def limits(
    save: Callable[[int], int],
    lean: Callable[[int], int],
    now: int,
    budget_bytes: int,
) -> tuple[Largest, Largest, list[tuple[str, int]]]:
    """The largest sizes of two plans, and what was asked for them."""
    grow = dict(zip(PLANS, (save, lean), strict=True))
    asked: list[tuple[str, int]] = []

    def needed(plan: str, size: int) -> Needed:
        return Needed(grow[plan](size), grow[plan](size))

    def peak(plan: str, size: int) -> Needed:
        asked.append((plan, size))
        return needed(plan, size)

    first = {plan: needed(plan, now) for plan in PLANS}
    save_all, leanest = largest(peak, first, budget_bytes, "batch size", now)
    assert (save_all.plan, leanest.plan) == PLANS
    return save_all, leanest, asked


@given(
    base=st.integers(0, 10**6),
    slope=st.integers(1, 10**5),
    bend=st.integers(0, 50),
    now=st.integers(1, 64),
    budget_bytes=st.integers(1, 10**8),
)
def test_the_largest_that_fits_of_any_convex_growth(
    base: int, slope: int, bend: int, now: int, budget_bytes: int
) -> None:
    def grows(size: int) -> int:
        return base + slope * size + bend * size * size

    found, _, asked = limits(grows, grows, now, budget_bytes)
    assert len(asked) == len(set(asked)) <= 2 * (MOST_RUNS - 1) and all(size != now for _, size in asked)
    if found.value is not None:
        assert grows(found.value) == found.peak_bytes
        assert grows(found.value) <= budget_bytes
        if not found.open_ended:
            assert grows(found.value + 1) > budget_bytes
    elif not found.open_ended:
        assert grows(1) > budget_bytes or len(asked) == 2 * (MOST_RUNS - 1)


def test_peaks_that_do_not_grow_evenly_are_closed_in_on() -> None:
    def fragmented(size: int) -> int:
        return 1000 + 50 * size + 170 * (size % 4)

    save, lean, asked = limits(fragmented, lambda size: 1000 + 60 * size + size**2 // 4, 4, 10_000)
    assert save.value is not None and fragmented(save.value) == save.peak_bytes
    assert fragmented(save.value) <= 10_000 < fragmented(save.value + 1) and not save.open_ended
    assert lean.value == 104 and not lean.open_ended
    assert len(asked) <= 12, asked


def test_sizes_that_the_model_refuses_end_the_search() -> None:
    def peak(plan: str, size: int) -> Needed:
        if size > 128:
            raise WorkloadError("the model has 128 positions")
        return Needed(size, size)

    save, _ = largest(peak, dict.fromkeys(PLANS, Needed(64, 64)), 10**6, "sequence length", 64)
    assert save.value == 128 and save.open_ended and "128 positions" in save.why


@pytest.mark.slow
def test_twice_what_is_found_does_not_fit(few_choices: None) -> None:
    budget = parse_budget("40MB")
    found, note = with_longest(SPEC, budget, device="cpu")
    assert found.seq_len is not None and found.seq_len > 64 and f"{found.seq_len:,} tokens" in note
    with Tracer.from_spec(SPEC.model_copy(update={"seq_len": 2 * found.seq_len})) as tracer:
        units = [unit.name for unit in tracer.units if unit.role == "block"]
        peak = tracer.trace(dict.fromkeys(units, RECOMPUTE)).peak_bytes
    assert budget.size is not None and peak > budget.size


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
