"""Knobs and the plans that they stand for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.schema import Measurement, Prediction, Trial
from autockpt.shipped import load_space
from autockpt.tuning.proposers.solver import SolverProposer, stands_still
from tests.samples import trial


@pytest.mark.parametrize(("seconds", "hides"), [({0.0: 1.0, 1.0: 0.9}, True), ({0.0: 1.0, 1.0: 1.0}, False)])
@pytest.mark.parametrize("kinds", [(), ("recompute",)])
def test_hidden_copies_are_tried_first_where_they_are_faster(
    seconds: dict[float, float], hides: bool, kinds: tuple[str, ...]
) -> None:
    space = load_space("knobs").restricted(kinds) if kinds else load_space("knobs")
    simulated = lambda point: seconds[float(point["hidden_copies"])]  # noqa: E731
    proposer: Any = SimpleNamespace(space=space, _affordable=lambda calls: calls, _simulated=simulated)
    first, *others = SolverProposer._seeds(proposer)
    assert len(others) == len(space.margins) - (not (hides and not kinds))
    assert (first.get("hidden_copies") == 1.0) is (hides and not kinds)


def test_the_simulated_allocator_gets_the_budget_less_misses() -> None:
    """Kept to all of it, plans of just the budget seemed to fit, and ran out of memory."""
    kept: list[int] = []
    seen = trial(0, predicted=Prediction(peak_bytes=124), measured=Measurement(peak_bytes=126, step_seconds=1.0))
    proposer: Any = SimpleNamespace(
        _usable_bytes=116, trials=SimpleNamespace(scored=[seen]), profiled=SimpleNamespace(keep_within=kept.append)
    )
    SolverProposer._learn_budget(proposer)
    assert kept == [114]


def test_a_search_stands_still_when_candidates_bring_nothing() -> None:
    def tried(*seconds: float, fits: bool = True) -> list[Trial]:
        guesses = (Prediction(peak_bytes=1, step_seconds=s) for s in seconds)
        return [trial(n, state="simulated", feasible=fits, predicted=p) for n, p in enumerate(guesses)]

    assert stands_still(tried(2.0, 1.0, 1.0, 1.2, 0.9995), 3, 1e-3)
    assert not stands_still(tried(2.0, 1.0, 1.0, 1.2, 0.99), 3, 1e-3)  # a gain among the last
    assert not stands_still(tried(1.0, 1.2, 1.2), 3, 1e-3)  # too few to say
    assert not stands_still(tried(1.0, 1.0, 1.0, 1.0, 1.0, fits=False), 3, 1e-3)  # something may fit yet
    assert not stands_still([*tried(1.0, 1.0, fits=False), *tried(1.0, 1.1, 1.2)], 3, 1e-3)
