from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.errors import WorkloadError
from autockpt.explain.limits import MOST_RUNS, grain, largest

PLANS = ("save everything", "leanest")


def peaks(save: Callable[[int], int], lean: Callable[[int], int], asked: list[int]) -> Callable[[int], dict[str, int]]:
    def read(size: int) -> dict[str, int]:
        asked.append(size)
        return {"save everything": save(size), "leanest": lean(size)}

    return read


@given(
    base=st.integers(0, 10**6),
    slope=st.integers(1, 10**5),
    bend=st.integers(0, 50),
    now=st.integers(1, 64),
    ceiling=st.integers(1, 10**8),
)
def test_the_largest_that_fits_of_any_convex_growth(base: int, slope: int, bend: int, now: int, ceiling: int) -> None:
    def grows(size: int) -> int:
        return base + slope * size + bend * size * size

    asked: list[int] = []
    (found, _) = largest(peaks(grows, grows, asked), now, ceiling, 1, "batch size")
    assert len(asked) == len(set(asked)) <= MOST_RUNS
    if found.value is not None:
        assert grows(found.value) == found.peak_bytes
        assert grows(found.value) <= ceiling
        if not found.open_ended:
            assert grows(found.value + 1) > ceiling
    elif not found.open_ended:
        assert grows(1) > ceiling or len(asked) == MOST_RUNS


def test_straight_lines_take_few_ghost_runs() -> None:
    asked: list[int] = []
    save, lean = largest(peaks(lambda n: 100 + 50 * n, lambda n: 100 + 9 * n, asked), 4, 1000, 1, "batch size")
    assert (save.value, lean.value) == (18, 100) and not save.open_ended and not lean.open_ended
    assert len(asked) <= 5, asked


def test_sizes_that_the_model_refuses_end_the_search() -> None:
    def read(size: int) -> dict[str, int]:
        if size > 128:
            raise WorkloadError("the model has 128 positions")
        return dict.fromkeys(PLANS, size)

    save, _ = largest(read, 64, 10**6, 2, "sequence length")
    assert save.value == 128 and save.open_ended and "128 positions" in save.why


def test_nothing_fits() -> None:
    save, _ = largest(peaks(lambda n: 10**6 + n, lambda n: 10**6 + n, []), 4, 10, 1, "batch size")
    assert save.value is None and save.peak_bytes is None


@pytest.mark.parametrize(("size", "step"), [(1, 1), (64, 2), (512, 16), (2048, 64), (3000, 64)])
def test_grains(size: int, step: int) -> None:
    assert grain(size) == step
