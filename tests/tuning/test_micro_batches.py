"""Which micro-batches fit, by ghost runs of a few of them."""

from __future__ import annotations

import pytest

from autockpt.tuning.batches import Sizes


@pytest.mark.parametrize("budget", [24, 99, 100, 199, 200, 800])
def test_the_largest_that_fits_is_found_by_a_few_ghost_runs(budget: int) -> None:
    sizes, looked = [1, 2, 4, 8, 16, 32], list[int]()

    def look(size: int) -> dict[str, int]:
        looked.append(size)
        return {"recompute": 25 * size}

    known = Sizes(sizes, budget, {}, look)
    assert known.largest("recompute") == max((size for size in sizes if 25 * size <= budget), default=None)
    assert known.largest("offload") is None
    assert len(looked) == len(set(looked)) <= 4
