from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema.problem import Problem, peak_of, seconds_of
from autockpt.solvers import exact, leanest
from tests.solvers.problems import check_exact, small_problems, uniform_problem
from tests.solvers.test_host import with_host


@pytest.mark.parametrize("binds", [False, True])
def test_label_setting_solves_what_no_host_budget_binds(monkeypatch: pytest.MonkeyPatch, binds: bool) -> None:
    problem = with_host(uniform_problem(3, 116), [0, 10], 0 if binds else 30)
    asked = []
    module = sys.modules["autockpt.solvers.exact"]
    for name in ("labels", "milp"):
        solve = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, s=solve, **more: asked.append(n) or s(*a, **more))
    answer = exact(problem, gap=0.0)
    if not binds:
        check_exact(problem, answer)
    assert asked == (["labels", "milp"] if binds else ["labels"])


@given(small_problems(), st.floats(0, 3))
def test_the_leanest_plan_within_a_time_is_found_to_a_share_of_the_range(problem: Problem, seconds: float) -> None:
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
