from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.errors import WorkloadError
from autockpt.explaining.limits import MOST_RUNS, grain, largest
from autockpt.schema.explanation import Largest

PLANS = ("save everything", "leanest")


def limits(
    save: Callable[[int], int], lean: Callable[[int], int], now: int, budget_bytes: int, floor: int = 0
) -> tuple[Largest, Largest, list[tuple[str, int]]]:
    """The largest sizes of two plans, and what was asked for them."""
    grow = dict(zip(PLANS, (save, lean), strict=True))
    asked: list[tuple[str, int]] = []

    def peak(plan: str, size: int) -> int:
        asked.append((plan, size))
        return grow[plan](size)

    first = {plan: grow[plan](now) for plan in PLANS}
    save_all, leanest = largest(peak, first, budget_bytes, 1, "batch size", now, floor)
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


def test_sizes_that_the_model_refuses_end_the_search() -> None:
    def peak(plan: str, size: int) -> int:
        if size > 128:
            raise WorkloadError("the model has 128 positions")
        return size

    save, _ = largest(peak, dict.fromkeys(PLANS, 64), 10**6, 2, "sequence length", 64)
    assert save.value == 128 and save.open_ended and "128 positions" in save.why


def test_other_sizes_that_cannot_be_asked_for_are_not_said_not_to_fit() -> None:
    """A factory makes its own batch, which does not fit."""

    def peak(plan: str, size: int) -> int:
        raise WorkloadError("--batch-size has no effect on train:make", remedy="Leave it out.")

    (found,) = largest(peak, {"leanest": 2000}, 1000, 1, "batch size", 4)
    assert (found.value, found.why) == (None, "--batch-size has no effect on train:make")


def test_nothing_fits() -> None:
    save, _, _ = limits(lambda n: 10**6 + n, lambda n: 10**6 + n, 4, 10)
    assert save.value is None and save.peak_bytes is None


@pytest.mark.parametrize(("size", "step"), [(1, 1), (64, 2), (512, 16), (2048, 64), (3000, 64)])
def test_grains(size: int, step: int) -> None:
    assert grain(size) == step
