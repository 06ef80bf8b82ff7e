from __future__ import annotations

import ctypes
from typing import Any

import pytest
import scipy.optimize
from hypothesis import given, settings

from autockpt.schema.problem import Point, Problem, UnitOptions
from autockpt.solvers import labels, milp
from tests.solvers.problems import (
    Level,
    brute_force,
    check_exact,
    equal_units,
    option,
    small_problems,
    transformer,
    uniform_problem,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(small_problems())
def test_agrees_with_brute_force(problem):
    check_exact(problem, milp(problem, gap=0.0))


def test_rounding_is_no_gap_where_the_best_step_takes_no_time():
    """HiGHS' bound may lie 1e-16 below zero; divided by a step time of zero that once looked like a gap."""
    choices = [
        option(Level(level=0), 0.0, 1, 0, 1),
        option(Level(level=1), 3.0, 2, 0, 0),
        option(Level(level=2), 1.0, 0, 0, 1),
    ]
    units = tuple(UnitOptions(name=name, options=tuple(choices)) for name in ("u0", "u1"))
    problem = Problem(units=units, points=(Point(base=0, prefix=0),), budget_bytes=0, base_seconds=0.0)
    answer = milp(problem, gap=0.0)
    check_exact(problem, answer)
    assert answer.gap == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("identical", [True, False])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_agrees_with_label_setting_on_a_transformer(share: float, identical: bool):
    problem = transformer(32, 6, seed=4, share=share, identical=identical)
    by_branching, by_labels = milp(problem), labels(problem)
    assert by_branching.feasible
    assert by_branching.peak <= problem.budget_bytes
    assert by_labels.seconds <= by_branching.seconds + 1e-9
    assert by_branching.seconds <= by_labels.seconds + 1e-4 * (problem.base_seconds + by_labels.seconds)


@pytest.mark.slow
def test_identical_units_with_growing_gradients_keep_the_optimum():
    """The order of equal neighbours is only fixed where that is safe; steep gradients make it unsafe in places."""
    for gradient in (0, 3, 9, 25):
        for budget in range(110, 200, 9):
            problem = uniform_problem(5, budget, gradient=gradient)
            check_exact(problem, milp(problem, gap=0.0))


@pytest.mark.parametrize(
    ("menu", "forward", "backward", "budget"),
    [
        ([(0.0, 4, 4, 11), (1.0, 6, 9, 4)], (0, 8), (18, 1), 23),
        ([(0.0, 7, 8, 6), (4.0, 0, 7, 3), (3.0, 6, 10, 2), (2.0, 8, 11, 12)], (1, 7, 10), (5, 3, 16), 43),
        ([(0.0, 1, 0, 6), (4.0, 0, 2, 1), (1.0, 5, 1, 5)], (7, 9), (1, 8), 11),
    ],
    ids=["the order is not safe", "it is safe for some pairs", "whose options go with others"],
)
def test_identical_units_whose_points_differ_keep_the_optimum(menu, forward, backward, budget):
    problem = equal_units(menu, forward, backward, budget)
    check_exact(problem, milp(problem, gap=0.0))


def test_out_of_time_falls_back_to_a_plan_that_fits():
    problem = transformer(64, 6, seed=5, share=0.3, identical=False)
    answer = milp(problem, time_limit=0.0)
    assert answer.feasible and answer.peak <= problem.budget_bytes
    assert answer.gap >= 0.0


def test_what_the_solver_prints_by_itself_stays_out_of_answers(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS 1.12 prints `HighsMipSolverData::transformNewIntegerFeasibleSolution …` where a line is left in."""
    solve = scipy.optimize.milp

    def printing(*args: Any, **options: Any) -> Any:
        ctypes.CDLL(None).puts(b"HighsMipSolverData::")
        return solve(*args, **options)

    monkeypatch.setattr(scipy.optimize, "milp", printing)
    print("before")
    answer = milp(transformer(4, 3, seed=4, share=0.5))
    print("after")
    assert answer.feasible and capfd.readouterr().out == "before\nafter\n"


def test_rounding_inside_the_solver_does_not_leak_out():
    """Hundreds of gigabytes, and budgets that single bytes decide: HiGHS' own answer oversteps the first of them."""
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
        answer = milp(large, gap=0.0)
        assert answer.peak <= budget
        assert answer.seconds == brute_force(large)[0]
