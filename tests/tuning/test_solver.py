"""Knobs and the plans that they stand for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.schema import Measurement, Prediction, Trial
from autockpt.tuning.proposers.solver import COPY_PRICES, SolverProposer, hidden_copies, neutral, stands_still
from autockpt.tuning.trials import Parameters
from search_spaces.spaces import load_space
from tests.reporting.samples import trial


@pytest.mark.slow
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


def test_the_simulated_allocator_is_kept_to_the_budget_less_what_ghost_runs_missed() -> None:
    """Kept to all of it, plans of just the budget seemed to fit, and ran out of memory."""
    kept: list[int] = []
    seen = trial(0, predicted=Prediction(peak_bytes=124), measured=Measurement(peak_bytes=126, step_seconds=1.0))
    proposer: Any = SimpleNamespace(
        _usable_bytes=116, trials=SimpleNamespace(scored=[seen]), profiled=SimpleNamespace(keep_within=kept.append)
    )
    SolverProposer.learn_budget(proposer)
    assert kept == [114]


def test_a_search_stands_still_where_the_last_candidates_brought_nothing() -> None:
    def tried(*seconds: float, fits: bool = True) -> list[Trial]:
        guesses = (Prediction(peak_bytes=1, step_seconds=s) for s in seconds)
        return [trial(n, state="simulated", feasible=fits, predicted=p) for n, p in enumerate(guesses)]

    assert stands_still(tried(2.0, 1.0, 1.0, 1.2, 0.9995), 3, 1e-3)
    assert not stands_still(tried(2.0, 1.0, 1.0, 1.2, 0.99), 3, 1e-3)  # a gain among the last
    assert not stands_still(tried(1.0, 1.2, 1.2), 3, 1e-3)  # too few to say
    assert not stands_still(tried(1.0, 1.0, 1.0, 1.0, 1.0, fits=False), 3, 1e-3)  # something may fit yet
    assert not stands_still([*tried(1.0, 1.0, fits=False), *tried(1.0, 1.1, 1.2)], 3, 1e-3)
