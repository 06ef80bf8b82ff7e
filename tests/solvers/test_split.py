import itertools

from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema.choices import OFFLOAD, SAVE, Choice
from autockpt.solvers import Checked, exact, refine_split, split_plans
from autockpt.solvers.problem import Problem, host_of, peak_of, seconds_of
from tests.solvers.problems import small_problems, uniform_problem
from tests.solvers.test_host import with_host


def by_hand(problem: Problem) -> list[tuple[float, int]]:
    """Seconds and peaks of all split plans that fit, one by one."""
    layers = [unit for unit in problem.units if unit.name != problem.head]
    choices = list(dict.fromkeys(option.choice for unit in layers for option in unit.options))
    heads = [None] if problem.head is None else [o.choice for o in problem.units[-1].options]
    found = []
    for front, back in itertools.product(choices, repeat=2):
        for count, head in itertools.product(range(len(layers) + 1), heads):
            wanted = [front if i < count else back for i in range(len(layers))]
            plan = {
                unit.name: choice if choice in [o.choice for o in unit.options] else unit.options[0].choice
                for unit, choice in zip(layers, wanted, strict=True)
            }
            plan |= {problem.head: head} if problem.head is not None and head is not None else {}
            fits = problem.host_budget is None or host_of(problem, plan) <= problem.host_budget
            if fits and peak_of(problem, plan) <= problem.budget_bytes:
                found.append((seconds_of(problem, plan), peak_of(problem, plan)))
    return found


@given(small_problems(), st.booleans())
def test_the_fastest_split_plan_is_found(problem: Problem, headed: bool) -> None:
    """``headed``: the last unit is the output head, which takes each of its options."""
    if headed and len(problem.units) > 1:
        problem = problem.model_copy(update={"head": problem.units[-1].name})
    plans, known = split_plans(problem), by_hand(problem)
    assert bool(plans) == bool(known)
    for plan in plans:
        assert plan.peak == peak_of(problem, plan.choices) <= problem.budget_bytes
        assert abs(plan.seconds - seconds_of(problem, plan.choices)) < 1e-9
    if known:
        assert abs(plans[0].seconds - min(known)[0]) < 1e-9
        assert exact(problem).seconds <= plans[0].seconds + 1e-4


def test_a_host_budget_bounds_what_is_offloaded() -> None:
    problem = with_host(uniform_problem(4, 125), [0, 0, 10], 20)
    plans = split_plans(problem, lambda front, back: (front, back) == (OFFLOAD, SAVE))
    assert plans and all(host_of(problem, plan.choices) <= 20 for plan in plans)


def test_refining_ends_with_a_plan_that_the_check_lets_pass() -> None:
    problem = uniform_problem(6, 140)
    asked: list[int] = []

    def check(plan: dict[str, Choice]) -> Checked:
        asked.append(1)
        return Checked(peak_of(problem, plan) + 7)  # the linear model misses 7 bytes

    plan = refine_split(problem, check, lambda front, back: SAVE in (front, back))
    assert plan is not None
    assert plan.peak == peak_of(problem, plan.choices) + 7 <= 140 and len(asked) <= 4
    fewer = [name for name in plan.choices if plan.choices[name] != SAVE][:-1]
    faster = {u.name: plan.choices[u.name] if u.name in fewer else SAVE for u in problem.units}
    assert peak_of(problem, faster) + 7 > 140  # one layer less would not fit


def test_refining_says_where_nothing_fits() -> None:
    problem = uniform_problem(4, 140)
    assert refine_split(problem, lambda plan: Checked(1000)) is None
