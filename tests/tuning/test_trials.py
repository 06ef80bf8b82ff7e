import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import SAVE, Choice, Prediction, Trial, parse_choice
from autockpt.tuning.trials import AS_FAST, AS_LEAN, complexity, preferred
from tests import samples

MIB = 2**20
BUDGET = 100 * MIB
KINDS = [SAVE, parse_choice("recompute"), parse_choice("offload")]


def trial(number: int, seconds: float, peak_bytes: int, choices: dict[str, Choice]) -> Trial:
    predicted = Prediction(peak_bytes=peak_bytes, step_seconds=seconds)
    return samples.trial(number, choices=choices, state="simulated", predicted=predicted, measured=None)


def layers(letters: str) -> dict[str, Choice]:
    kinds = dict(zip(".RO", KINDS, strict=True))
    return {f"layers.{i}": kinds[letter] for i, letter in enumerate(letters)}


def named(*plans: Trial, error: float = AS_FAST) -> int:
    return preferred(plans, {plan.number: plan.score_seconds for plan in plans}, BUDGET, error).number


@pytest.mark.parametrize(
    ("one", "other", "is_named"),
    [
        ((1.0, 99, "RORO"), (1.1, 10, "RRRR"), 0),  # the fastest, whatever the others need
        ((1.0, 99, "RR.."), (1.004, 90, "ROOO"), 1),  # of equally fast ones the leanest
        ((1.0, 90, "RORO"), (1.004, 91, "RR.."), 1),  # of equally fast and lean ones the simplest
    ],
)
def test_fast_then_lean_then_simple(one: Any, other: Any, is_named: int) -> None:
    plans = [trial(n, seconds, peak * MIB, layers(text)) for n, (seconds, peak, text) in enumerate((one, other))]
    assert named(*plans) == is_named


@given(
    st.lists(
        st.tuples(
            st.floats(1.0, 1.05), st.integers(1, 100), st.text(alphabet=".RO", min_size=4, max_size=4).map(layers)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0.0, AS_FAST, 0.01]),
)
def test_no_plan_is_named_that_another_one_dominates(
    plans: list[tuple[float, int, dict[str, Choice]]], error: float
) -> None:
    trials = [trial(i, seconds, peak * MIB, choices) for i, (seconds, peak, choices) in enumerate(plans)]
    ours = trials[named(*trials, error=error)]
    peak = ours.predicted.peak_bytes if ours.predicted is not None else math.inf
    for other in trials:
        assert other.predicted is not None
        faster = other.score_seconds * (1 + error) < ours.score_seconds
        leaner = other.predicted.peak_bytes < peak - AS_LEAN * BUDGET
        assert not (faster and other.predicted.peak_bytes <= peak)
        assert not (leaner and other.score_seconds <= ours.score_seconds)
        equal = complexity(other.choices) <= complexity(ours.choices)
        both = other.score_seconds <= ours.score_seconds and other.predicted.peak_bytes <= peak
        better = other.score_seconds < ours.score_seconds or other.predicted.peak_bytes < peak
        assert not (equal and both and better)
