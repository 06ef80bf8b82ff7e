"""When a search has nothing left to find."""

from __future__ import annotations

from autockpt.schema import Prediction, Trial
from autockpt.tuning.proposers.solver import stands_still
from tests.samples import trial


def test_a_search_stands_still_when_candidates_bring_nothing() -> None:
    def tried(*seconds: float, fits: bool = True) -> list[Trial]:
        guesses = (Prediction(peak_bytes=1, step_seconds=s) for s in seconds)
        return [trial(n, state="simulated", feasible=fits, predicted=p) for n, p in enumerate(guesses)]

    assert stands_still(tried(2.0, 1.0, 1.0, 1.2, 0.9995), 3, 1e-3)
    assert not stands_still(tried(2.0, 1.0, 1.0, 1.2, 0.99), 3, 1e-3)  # a gain among the last
    assert not stands_still(tried(1.0, 1.2, 1.2), 3, 1e-3)  # too few to say
    assert not stands_still(tried(1.0, 1.0, 1.0, 1.0, 1.0, fits=False), 3, 1e-3)  # something may fit yet
    assert not stands_still([*tried(1.0, 1.0, fits=False), *tried(1.0, 1.1, 1.2)], 3, 1e-3)
