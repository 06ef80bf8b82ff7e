from __future__ import annotations

import sys

import pytest

from autockpt.solvers import exact
from tests.solvers.problems import check_exact, uniform_problem
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
