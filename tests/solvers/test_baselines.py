from __future__ import annotations

import pytest

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE
from autockpt.schema.problem import UnitOptions
from autockpt.solvers import chen_sqrt, every_nth, first_k, none, offload_all, recompute_all, uniform
from tests.solvers.problems import uniform_problem

LETTERS = {"save": ".", "recompute": "R", "offload": "O"}


def strip(answer) -> str:
    return "".join(LETTERS[c.kind] for c in answer.choices.values())


def test_uniform_plans_name_every_unit():
    problem = uniform_problem(4)
    assert strip(none(problem)) == "...."
    assert strip(recompute_all(problem)) == "RRRR"
    assert strip(offload_all(problem)) == "OOOO"


def test_every_nth_starts_with_the_first_unit():
    problem = uniform_problem(7)
    assert strip(every_nth(problem, 1)) == "RRRRRRR"
    assert strip(every_nth(problem, 2)) == "R.R.R.R"
    assert strip(every_nth(problem, 3, OFFLOAD)) == "O..O..O"
    with pytest.raises(ValueError, match="n >= 1"):
        every_nth(problem, 0)


def test_first_k():
    problem = uniform_problem(4)
    assert [strip(first_k(problem, k)) for k in (0, 2, 4)] == ["....", "RR..", "RRRR"]
    with pytest.raises(ValueError, match="0 <= k <= 4"):
        first_k(problem, 5)


@pytest.mark.parametrize(("n", "kept"), [(1, 1), (4, 2), (9, 3), (12, 3), (32, 5)])
def test_chen_keeps_about_a_square_root_and_the_last(n: int, kept: int):
    plan = strip(chen_sqrt(uniform_problem(n)))
    assert plan.count(".") == kept
    assert plan.endswith(".")
    runs = [len(run) for run in plan[:-1].split(".")]
    assert max(runs) - min(runs) <= 1


def test_numbers_are_the_problems_own():
    """4 units, base 100. Save: after forward 100+5+40; backward of the last 100+30+12 = 142 < 145."""
    problem = uniform_problem(4, budget=144)
    everything = none(problem)
    assert (everything.peak, everything.seconds, everything.feasible) == (145, 0.0, False)
    lean = recompute_all(problem)  # after forward 100+5+8; backward of the last 100+6+13
    assert (lean.peak, lean.seconds, lean.feasible) == (119, 4.0, True)


def test_a_unit_without_the_choice_saves():
    problem = uniform_problem(2)
    only_save = UnitOptions(name="head", options=problem.units[0].options[:1])
    problem = problem.model_copy(update={"units": (problem.units[0], only_save)})
    assert uniform(problem, RECOMPUTE).choices == {"layers.0": RECOMPUTE, "head": SAVE}


def test_a_unit_that_offers_neither_is_an_error():
    problem = uniform_problem(1)
    only = UnitOptions(name="odd", options=problem.units[0].options[2:])
    with pytest.raises(KeyError, match="odd"):
        recompute_all(problem.model_copy(update={"units": (only,)}))
