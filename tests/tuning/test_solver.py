"""Knobs and the plans that they stand for."""

from __future__ import annotations

from autockpt.tuning.proposers.solver import COPY_PRICES, hidden_copies, neutral
from autockpt.tuning.trials import Parameters
from search_spaces.spaces import load_space


def test_the_price_of_copies_is_the_one_whose_plan_should_be_fastest() -> None:
    space = load_space("knobs")
    plain = neutral(space, 0.0)

    def hides(parameters: Parameters) -> float:
        return abs(float(parameters["offload_price"]) - COPY_PRICES[1])

    assert hidden_copies(plain, space, 1.0, hides) == [{**plain, "offload_price": COPY_PRICES[1]}]


def test_the_profiles_own_price_is_tried_where_the_fitted_one_is_another() -> None:
    space = load_space("knobs")
    plain = neutral(space, 0.0)

    def dear(parameters: Parameters) -> float:
        return -0.5 * float(parameters["offload_price"])

    assert hidden_copies(plain, space, 0.5, dear) == [{**plain, "offload_price": 2.0}]


def test_where_the_profile_is_right_nothing_is_added() -> None:
    space = load_space("knobs")
    plain = neutral(space, 0.0)
    assert hidden_copies(plain, space, 0.8, lambda parameters: 1.0) == []
    assert hidden_copies(plain, space, 0.8, lambda parameters: float("inf")) == []
    without = space.restricted(("recompute",))
    assert hidden_copies(neutral(without, 0.0), without, 0.8, lambda parameters: 0.0) == []
