from __future__ import annotations

import sys

import pytest

from autockpt.schema.problem import Point
from autockpt.solvers import exact
from tests.solvers.problems import check_exact, uniform_problem


@pytest.mark.parametrize("chain", [True, False])
def test_label_setting_solves_what_counts_the_units_before(monkeypatch: pytest.MonkeyPatch, chain: bool) -> None:
    problem = uniform_problem(3, 122)
    if not chain:
        late = Point(base=100, prefix=1, own=2, phase="backward")
        problem = problem.model_copy(update={"points": (*problem.points, late)})
    asked = []
    module = sys.modules["autockpt.solvers.exact"]
    for name in ("labels", "milp"):
        solve = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, s=solve, **more: asked.append(n) or s(*a, **more))
    check_exact(problem, exact(problem, gap=0.0))
    assert asked == ["labels" if chain else "milp"]
