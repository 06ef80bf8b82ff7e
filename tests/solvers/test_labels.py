from __future__ import annotations

import sys
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autockpt.schema.choices import RECOMPUTE, SAVE
from autockpt.schema.problem import Point, Problem
from autockpt.solvers import labels, milp
from tests.solvers.problems import brute_force, check_exact, equal_units, small_problems, transformer, uniform_problem


@pytest.mark.slow
@settings(max_examples=300)
@given(small_problems())
def test_agrees_with_brute_force(problem):
    check_exact(problem, labels(problem))


@settings(max_examples=60)
@given(small_problems())
@example(equal_units([(0.0, 5, 5, 8), (1.0, 4, 2, 8), (2.0, 4, 1, 0)], (8, 8), (4, 6), 18))
@example(equal_units([(0.0, 10, 3, 4), (1.0, 4, 9, 6), (2.0, 1, 2, 5)], (2, 9), (0, 3), 21))
@example(equal_units([(0.0, 6, 1, 3), (4.0, 0, 3, 0)], (2, 4), (8, 4), 13))
def test_what_few_labels_find_and_prove_is_true(problem):
    with patch.object(sys.modules["autockpt.solvers.labels"], "WIDTHS", (1, 2, 65536)):
        check_exact(problem, labels(problem, gap=0.0))


@settings(max_examples=40)
@given(small_problems(), st.sampled_from([0.05, 0.2]))
@example(equal_units([(0.0, 5, 5, 8), (4.0, 1, 6, 6), (2.0, 2, 12, 7)], (11, 7, 7), (11, 9, 10), 24), 0.2)
def test_no_smaller_gap_is_said_than_there_is(problem, accepted):
    with patch.object(sys.modules["autockpt.solvers.labels"], "WIDTHS", (1, 2, 65536)):
        answer = labels(problem, gap=accepted)
    fastest, _ = brute_force(problem)
    if fastest is not None:
        assert answer.seconds - answer.gap * abs(problem.base_seconds + answer.seconds) <= fastest + 1e-9


@pytest.mark.slow
@settings(max_examples=40)
@given(small_problems())
def test_more_budget_is_never_slower(problem):
    steps = [
        labels(problem.model_copy(update={"budget_bytes": problem.budget_bytes + extra})) for extra in (0, 7, 40, 1000)
    ]
    fitting = [a.seconds for a in steps if a.feasible]
    assert fitting == sorted(fitting, reverse=True)
    assert [a.feasible for a in steps] == sorted(a.feasible for a in steps)


@pytest.mark.parametrize(
    ("budget", "seconds", "kinds"),
    [
        (145, 0.0, "...."),  # saving everything peaks after forward: 100 + 5 + 4·10
        (144, 1.0, None),  # one unit less: 100 + 5 + 3·10 + 2 = 137
        (136, 2.0, None),
        (119, 4.0, "RRRR"),  # recompute all: backward of the last, 100 + 3·2 + 13
        (118, 6.0, None),  # offload the last unit instead: its backward 100 + 3·2 + 12 = 118
    ],
)
def test_hand_computed_table(budget: int, seconds: float, kinds: str | None):
    answer = labels(uniform_problem(4, budget))
    assert answer.feasible
    assert answer.seconds == pytest.approx(seconds)
    if kinds:
        expected = [SAVE if letter == "." else RECOMPUTE for letter in kinds]
        assert list(answer.choices.values()) == expected


def test_infeasible_names_the_smallest_peak_and_its_fastest_plan():
    """Offload everywhere needs 100 + 3·1 + 12 = 115 in the last backward; no other mix needs less."""
    problem = uniform_problem(4, budget=50)
    answer = labels(problem)
    assert not answer.feasible
    assert answer.peak == brute_force(problem)[1]
    assert labels(problem.model_copy(update={"budget_bytes": answer.peak})).seconds == answer.seconds


def test_gradients_that_grow_in_backward_move_the_peak_to_the_first_units():
    """With 20 bytes of gradients per unit the first unit's backward is the tightest: 100 + 60 + 12 whatever is kept."""
    problem = uniform_problem(4, budget=172, gradient=20)
    assert labels(problem).seconds == 0.0
    assert labels(problem.model_copy(update={"budget_bytes": 171})).peak == 172


def test_identical_units_do_not_explode():
    for share in (0.15, 0.5, 0.8):
        problem = transformer(200, 6, seed=1, share=share)
        answer = labels(problem, time_limit=10, gap=0.0)
        assert answer.feasible and answer.gap == 0.0


def test_out_of_time_still_answers_and_says_how_far_it_may_be():
    problem = transformer(64, 6, seed=2, share=0.4, identical=False)
    hasty, exact = labels(problem, time_limit=0.0), labels(problem, gap=0.0)
    assert hasty.feasible
    bound = hasty.seconds - hasty.gap * (problem.base_seconds + hasty.seconds)
    assert bound <= exact.seconds + 1e-9 <= hasty.seconds + 2e-9


def test_an_accepted_gap_is_kept():
    problem = transformer(64, 6, seed=3, share=0.4)
    loose, exact = labels(problem, gap=1e-2), labels(problem, gap=0.0)
    assert loose.seconds - exact.seconds <= 1e-2 * problem.base_seconds
    assert loose.gap <= 1e-2


def test_points_out_of_order_are_refused():
    problem = uniform_problem(3, 500)
    odd = problem.model_copy(update={"points": (Point(base=0, prefix=1, own=2, phase="backward"),)})
    for solve in (labels, milp):
        with pytest.raises(ValueError, match="out of order"):
            solve(odd)


def test_a_step_without_units():
    for solve in (labels, milp):
        empty = Problem(units=(), points=(Point(base=7, prefix=0),), budget_bytes=7)
        assert solve(empty).feasible and solve(empty).peak == 7
        assert solve(empty.model_copy(update={"budget_bytes": 6})).peak == 7
