"""Which micro-batches fit, by ghost runs of a few of them."""

from __future__ import annotations

import pytest

from autockpt.tuning.batches import Sizes


@pytest.mark.slow
@pytest.mark.parametrize("budget", [99, 100, 199, 200, 800])
def test_the_largest_that_fits_is_found_where_a_single_row_needs_less_than_the_line(budget: int) -> None:
    """A single row has no padding, so its batch no mask: a line from it to two rows is too steep."""
    sizes, looked = [1, 2, 4, 8, 16, 32], list[int]()

    def look(size: int) -> dict[str, int]:
        looked.append(size)
        return {"recompute": 25 * size}

    known = Sizes(sizes, budget, {1: {"recompute": 10}, 2: {"recompute": 50}}, look)
    assert known.largest("recompute") == max(size for size in sizes if 25 * size <= budget)
    assert len(looked) <= 2


def test_a_line_through_two_sizes_says_what_fits() -> None:
    peaks = {1: {"save": 30, "recompute": 20}, 2: {"save": 50, "recompute": 30}}
    known = Sizes([1, 2, 4, 8], 100, peaks, look=lambda size: {"save": 30 + 20 * size, "recompute": 90})
    assert known.predicted(4, "save") == 90 and known.predicted(4, "offload") is None
    assert known.largest("save") == 4 and known.largest("recompute") == 8 and known.largest("offload") is None
