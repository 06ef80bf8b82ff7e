import itertools
import sys
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autockpt.solvers import exact, leanest
from autockpt.solvers.problem import Point, Problem, peak_of, seconds_of
from tests.solvers.problems import brute_force, check_exact, equal_units, small_problems, transformer, uniform_problem


@pytest.mark.slow
@settings(max_examples=150)
@given(small_problems())
def test_agrees_with_brute_force(problem):
    check_exact(problem, exact(problem))


@settings(max_examples=60)
@given(small_problems())
@example(uniform_problem(4, 171, gradient=20))
@example(equal_units([(0.0, 4, 4, 11), (1.0, 6, 9, 4)], (0, 8), (18, 1), 23))
@example(equal_units([(0.0, 5, 5, 8), (1.0, 4, 2, 8), (2.0, 4, 1, 0)], (8, 8), (4, 6), 18))
@example(equal_units([(0.0, 10, 3, 4), (1.0, 4, 9, 6), (2.0, 1, 2, 5)], (2, 9), (0, 3), 21))
@example(equal_units([(0.0, 6, 1, 3), (4.0, 0, 3, 0)], (2, 4), (8, 4), 13))
def test_few_labels_find_the_same(problem):
    with patch.object(sys.modules["autockpt.solvers.exact"], "WIDTHS", (1, 2, 65536)):
        check_exact(problem, exact(problem, gap=0.0))


def test_infeasible_names_the_smallest_peak_and_its_fastest_plan():
    """Offload everywhere needs 100 + 3·1 + 12 = 115 in the last backward; no other mix needs less."""
    problem = uniform_problem(4, budget=50)
    answer = exact(problem)
    assert not answer.feasible
    assert answer.peak == brute_force(problem)[1]
    assert exact(problem.model_copy(update={"budget_bytes": answer.peak})).seconds == answer.seconds


def test_identical_units_do_not_explode():
    for share in (0.15, 0.5, 0.8):
        problem = transformer(200, 6, seed=1, share=share)
        answer = exact(problem, time_limit=10, gap=0.0)
        assert answer.feasible


def test_out_of_time_still_answers():
    assert exact(transformer(64, 6, seed=2, share=0.4, identical=False), time_limit=0.0).feasible


def test_points_out_of_order_are_refused():
    problem = uniform_problem(3, 500)
    odd = problem.model_copy(update={"points": (Point(base=0, prefix=1, own=2, phase="backward"),)})
    with pytest.raises(ValueError, match="out of order"):
        exact(odd)


def test_a_step_without_units():
    empty = Problem(units=(), points=(Point(base=7, prefix=0),), budget_bytes=7)
    assert exact(empty).feasible and exact(empty).peak == 7
    assert exact(empty.model_copy(update={"budget_bytes": 6})).peak == 7


def test_hundreds_of_gigabytes_are_counted_to_the_byte():
    """Budgets that single bytes decide."""
    huge = 2**33

    def scaled(option, i):
        return {"kept": option.kept * huge + i, "forward": option.forward * huge, "backward": option.backward * huge}

    problem = uniform_problem(6)
    units = tuple(
        u.model_copy(update={"options": tuple(o.model_copy(update=scaled(o, i)) for o in u.options)})
        for i, u in enumerate(problem.units)
    )
    points = tuple(p.model_copy(update={"base": p.base * huge}) for p in problem.points)
    for budget in (120 * huge, 137 * huge + 10, 145 * huge + 15, 145 * huge + 14):
        large = problem.model_copy(update={"units": units, "points": points, "budget_bytes": budget})
        answer = exact(large, gap=0.0)
        assert answer.peak <= budget
        assert answer.seconds == brute_force(large)[0]


@given(small_problems(), st.floats(0, 3))
def test_the_leanest_plan_within_a_time_is_found(problem: Problem, seconds: float) -> None:
    found = leanest(problem, seconds)
    plans = [
        {u.name: o.choice for u, o in zip(problem.units, picked, strict=True)}
        for picked in itertools.product(*[u.options for u in problem.units])
    ]
    fitting = [p for p in plans if peak_of(problem, p) <= problem.budget_bytes and seconds_of(problem, p) <= seconds]
    if not fitting:
        assert found is None
        return
    least = min(peak_of(problem, plan) for plan in fitting)
    grain = (problem.budget_bytes - min(peak_of(problem, plan) for plan in plans)) / 2**8 + 1
    assert found is not None and found.feasible and found.seconds <= seconds
    assert least <= found.peak <= least + grain
