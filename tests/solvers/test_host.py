"""A second bound: bytes that all units together move to the host."""

import itertools
import sys
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice
from autockpt.solvers import Checked, exact, refine
from autockpt.solvers.problem import Problem, host_of, peak_of, seconds_of
from tests.solvers.problems import small_problems, transformer, uniform_problem


def with_host(problem: Problem, sizes: list[int], host_budget: int) -> Problem:
    """The same problem with ``sizes`` as the host bytes of its options, in turns; each unit's first moves nothing."""
    turn = itertools.cycle(sizes)
    units = tuple(
        unit.model_copy(
            update={
                "options": tuple(
                    o.model_copy(update={"host": next(turn) if k else 0}) for k, o in enumerate(unit.options)
                )
            }
        )
        for unit in problem.units
    )
    return problem.model_copy(update={"units": units, "host_budget": host_budget})


@st.composite
def bounded(draw: st.DrawFn) -> Problem:
    """Small problems with bytes on the host and a budget for these."""
    problem = draw(small_problems())
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=7))
    return with_host(problem, sizes, draw(st.integers(0, 120)))


def plans(problem: Problem) -> list[dict[str, Choice]]:
    """Every plan within the host budget."""
    picked = itertools.product(*[u.options for u in problem.units])
    found = [{u.name: o.choice for u, o in zip(problem.units, options, strict=True)} for options in picked]
    return [plan for plan in found if host_of(problem, plan) <= (problem.host_budget or 0)]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(bounded(), st.sampled_from([(64, 4096, 65536), (1, 2, 65536), (2, 3, 65536)]), st.sampled_from([1, 2, 8]))
def test_agrees_with_brute_force(problem: Problem, widths: tuple[int, ...], levels: int) -> None:
    module = sys.modules["autockpt.solvers.exact"]
    with patch.object(module, "WIDTHS", widths), patch.object(module, "HOST_LEVELS", levels):
        answer = exact(problem, gap=0.0)
    within = plans(problem)
    fitting = [seconds_of(problem, plan) for plan in within if peak_of(problem, plan) <= problem.budget_bytes]
    assert answer.feasible == bool(fitting)
    assert host_of(problem, answer.choices) <= (problem.host_budget or 0)
    assert answer.peak == peak_of(problem, answer.choices)
    if fitting:
        assert answer.seconds == pytest.approx(min(fitting))
    else:
        assert answer.peak == min(peak_of(problem, plan) for plan in within)


@pytest.mark.parametrize("identical", [True, False])
def test_a_transformer_is_planned_within_both_budgets(identical: bool) -> None:
    problem = transformer(24, 6, seed=4, share=0.4, identical=identical)
    problem = with_host(problem, [0, 0, 11, 13, 17], 10**6)
    bounded = problem.model_copy(update={"host_budget": host_of(problem, exact(problem).choices) // 2})
    answer = exact(bounded)
    assert answer.feasible
    assert host_of(bounded, answer.choices) <= (bounded.host_budget or 0)


def test_out_of_time_the_host_budget_is_kept():
    problem = with_host(transformer(48, 6, seed=5, share=0.5, identical=False), [11, 13], 40)
    answer = exact(problem, time_limit=0.0)
    assert host_of(problem, answer.choices) <= 40


@pytest.mark.parametrize("rounding", [0, 3, 12])
def test_refine_learns_what_the_pools_round_up_by(rounding: int):
    """The check counts more on the host than the problem does; plans over the host budget never pass."""
    plain = uniform_problem(4, 125)
    dear = tuple(
        unit.model_copy(
            update={
                "options": tuple(
                    o.model_copy(update={"host": 10 if o.choice == OFFLOAD else 0, "seconds": seconds})
                    for o, seconds in zip(unit.options, (0.0, 5.0, 1.0), strict=True)
                )
            }
        )
        for unit in plain.units
    )
    problem = plain.model_copy(update={"units": dear, "host_budget": 30})

    def check(plan):
        host = host_of(problem, plan)
        return Checked(peak_of(problem, plan), None, host + rounding if host else 0)

    refined = refine(problem, check)
    assert refined.feasible and refined.checked.host_bytes <= 30
    allowed = [
        dict(zip([u.name for u in problem.units], picked, strict=True))
        for picked in itertools.product((SAVE, RECOMPUTE, OFFLOAD), repeat=4)
    ]
    fitting = [p for p in allowed if check(p).peak_bytes <= 125 and check(p).host_bytes <= 30]
    assert seconds_of(problem, refined.choices) == min(seconds_of(problem, p) for p in fitting)
