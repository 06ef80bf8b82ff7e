from __future__ import annotations

import pytest
from hypothesis import given, settings

from autockpt.schema.problem import peak_of
from autockpt.solvers import greedy, labels
from autockpt.solvers.greedy import polish
from tests.solvers.problems import brute_force, small_problems, transformer


@pytest.mark.slow
@settings(max_examples=100)
@given(small_problems())
def test_finds_a_plan_whenever_there_is_one(problem):
    answer = greedy(problem)
    fastest, leanest = brute_force(problem)
    assert answer.feasible == (fastest is not None)
    if fastest is None:
        assert answer.smallest_peak == leanest
    else:
        assert answer.seconds >= fastest - 1e-9
        assert answer.peak == peak_of(problem, answer.choices) <= problem.budget_bytes


@pytest.mark.slow
@settings(max_examples=60)
@given(small_problems(chain=False))
def test_never_promises_what_does_not_fit(problem):
    answer = greedy(problem)
    assert answer.feasible == (peak_of(problem, answer.choices) <= problem.budget_bytes)


def test_polish_leaves_no_single_change_that_fits():
    problem = transformer(24, 6, seed=6, share=0.5, identical=False)
    picks = polish(problem, [1] * 24)
    for i, unit in enumerate(problem.units):
        for j, option in enumerate(unit.options):
            if option.seconds < unit.options[picks[i]].seconds:
                changed = [*picks[:i], j, *picks[i + 1 :]]
                choices = {u.name: u.options[k].choice for u, k in zip(problem.units, changed, strict=True)}
                assert peak_of(problem, choices) > problem.budget_bytes


def test_is_close_to_the_optimum_on_a_transformer():
    for seed in range(3):
        problem = transformer(48, 6, seed=seed, share=0.4)
        assert greedy(problem).seconds <= 1.1 * labels(problem).seconds
