from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema.runs import best, pareto_front
from autockpt.schema.trial import Measurement, Prediction, Trial


def trial(
    number: int, peak: int | None = None, seconds: float = 1.0, *, predicted=None, fits=True, plan="", **more
) -> Trial:
    return Trial(
        number=number,
        name=more.pop("name", f"knobs #{number}"),
        encoding=more.pop("encoding", "knobs"),
        choices={},
        plan_hash=plan or f"plan{number}",
        state=more.pop("state", "measured" if peak is not None and fits else "over_budget"),
        feasible=fits and peak is not None,
        predicted=None if predicted is None else Prediction(peak_bytes=predicted[0], step_seconds=predicted[1]),
        measured=None if peak is None else Measurement(peak_bytes=peak, step_seconds=seconds, noise=0.01),
        **more,
    )


def numbers(trials) -> list[int]:
    return [t.number for t in trials]


def test_best_is_the_fastest_measured_plan_that_fits():
    trials = [
        trial(0, 90, 1.0, fits=False),
        trial(1, 50, 3.0),
        trial(2, 60, 2.0),
        trial(3, predicted=(10, 0.1), state="predicted_over"),
    ]
    assert numbers(best(trials)) == [2]
    assert numbers(best(trials, 5)) == [2, 1]
    assert best(trials[:1]) == []


def test_pareto_front_leanest_first_and_over_budget_included():
    trials = [
        trial(0, 100, 1.0, fits=False),
        trial(1, 80, 1.5),
        trial(2, 80, 1.4),
        trial(3, 70, 2.0),
        trial(4, 75, 2.5),
        trial(5, 70, 2.0),
        trial(6, predicted=(1, 0.1), state="predicted_over"),
    ]
    assert numbers(pareto_front(trials)) == [3, 2, 0]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=15))
def test_pareto_front_is_what_the_definition_says(points):
    trials = [trial(i, peak, float(seconds)) for i, (peak, seconds) in enumerate(points)]
    front = {points[t.number] for t in pareto_front(trials)}
    assert front == {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
