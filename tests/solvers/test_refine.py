import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE
from autockpt.solvers import Checked, exact, refine
from autockpt.solvers.problem import Point, Problem, UnitOptions, option_of, peak_of
from autockpt.solvers.refine import point_values, shifted
from tests.solvers.problems import option, small_problems, transformer, uniform_problem


class Checker:
    """Knows the true bytes: the linear ones plus an error per point, and one per unit that does not save."""

    def __init__(self, problem: Problem, offsets, per_change: int = 0, by_point: bool = True) -> None:
        self.truth, self.per_change, self.by_point, self.seen = shifted(problem, offsets), per_change, by_point, []

    def peak(self, choices) -> int:
        changes = sum(option_of(u, choices[u.name]) != u.options[0] for u in self.truth.units)
        return peak_of(self.truth, choices) + self.per_change * changes

    def __call__(self, choices) -> Checked:
        self.seen.append(dict(choices))
        extra = self.peak(choices) - peak_of(self.truth, choices)
        values = [v + extra for v in point_values(self.truth, choices)] if self.by_point else None
        return Checked(self.peak(choices), values)


@pytest.mark.slow
@settings(max_examples=75)
@given(small_problems(), st.data())
def test_with_errors_per_point_it_finds_the_true_optimum(problem, data):
    offsets = data.draw(st.lists(st.integers(-30, 30), min_size=len(problem.points), max_size=len(problem.points)))
    check = Checker(problem, offsets)
    refined = refine(problem, check, max_calls=30)
    best = exact(check.truth, gap=0.0)
    assert refined.feasible == best.feasible
    assert refined.assignment.peak == check.peak(refined.choices)
    if best.feasible:
        assert refined.assignment.seconds == pytest.approx(best.seconds, abs=1e-4)


@pytest.mark.slow
@settings(max_examples=100)
@given(small_problems(), st.integers(-8, 8), st.integers(-20, 20), st.booleans())
def test_the_plan_passes_the_referee_whatever_the_model_misses(problem, per_change, error, by_point):
    check = Checker(problem, [error] * len(problem.points), per_change, by_point)
    refined = refine(problem, check, max_calls=40)
    assert len(check.seen) <= 40
    assert refined.assignment.peak == check.peak(refined.choices)
    assert refined.feasible == (refined.assignment.peak <= problem.budget_bytes)
    if not refined.feasible:
        assert refined.assignment.peak == min(check.peak(c) for c in check.seen)


@pytest.mark.parametrize("share", [0.2, 0.45, 0.7])
@pytest.mark.parametrize("error", [-0.01, 0.0, 0.02])
@pytest.mark.parametrize("by_point", [True, False])
def test_a_transformer_settles_within_few_calls(share: float, error: float, by_point: bool):
    problem = transformer(32, 6, seed=7, share=share)
    offsets = [int(p.base * error * (1 + (i % 3) / 10)) for i, p in enumerate(problem.points)]
    check = Checker(problem, offsets, by_point=by_point)
    refined = refine(problem, check)
    assert refined.feasible
    assert len(check.seen) <= 12


def test_what_is_known_is_not_asked_again():
    problem = transformer(16, 4, seed=9, share=0.5)
    check = Checker(problem, [5_000_000] * len(problem.points))
    remembered: dict = {}
    first = refine(problem, check, remembered=remembered)
    asked = len(check.seen)
    assert asked == 1, "a model that is off by a constant"
    second = refine(problem, check, remembered=remembered, offsets=first.offsets)
    assert len(check.seen) == asked
    assert second.choices == first.choices


def test_a_pessimistic_model_does_not_give_up():
    """The model thinks nothing fits; the check sees 60 bytes less."""
    problem = uniform_problem(4, budget=80)
    refined = refine(problem, Checker(problem, [-60] * len(problem.points)))
    assert refined.feasible
    assert refined.assignment.seconds == exact(problem.model_copy(update={"budget_bytes": 140})).seconds


def test_the_leanest_plan_is_asked_about_where_mixtures_miss():
    """By the model the leanest plan is a mixture, which really needs far more than either of the two."""
    problem = uniform_problem(4, budget=116)
    recompute, offload = problem.units[0].options[1:]
    options = (problem.units[0].options[0], recompute.model_copy(update={"backward": 11}), offload)
    problem = problem.model_copy(
        update={"units": tuple(u.model_copy(update={"options": options}) for u in problem.units)}
    )

    def torn(choices) -> Checked:
        return Checked(peak_of(problem, choices) + 40 * (len(set(map(str, choices.values()))) > 1))

    refined = refine(problem, torn)
    assert refined.feasible and all(choice == OFFLOAD for choice in refined.choices.values())


def test_a_plan_that_keeps_least_is_asked_about_beyond_the_calls():
    """The model misses both alike: save is refused, and then deems all else impossible."""
    numbers = ((SAVE, 0.0, 2, 15), (OFFLOAD, 3.0, 0, 18), (RECOMPUTE, 1.0, 1, 18))
    unit = UnitOptions(name="u", options=tuple(option(c, seconds, kept, own, 0) for c, seconds, kept, own in numbers))
    point = Point(base=0, prefix=0, own=0, phase="forward")
    problem = Problem(units=(unit,), points=(point,), budget_bytes=15, base_seconds=10.0)
    refined = refine(problem, lambda plan: Checked(20 if plan["u"] == SAVE else 10), max_calls=1)
    assert refined.choices == {"u": OFFLOAD}


def test_too_few_calls():
    problem = transformer(12, 4, seed=11, share=0.4, identical=False)
    check = Checker(problem, [40_000_000] * len(problem.points))
    hasty = refine(problem, check, max_calls=1)
    assert len(check.seen) == 1 and hasty.choices == check.seen[0]
    with pytest.raises(ValueError, match="max_calls"):
        refine(problem, check, max_calls=0)


def with_a_host(copying: int) -> Problem:
    """One unit within 15 bytes: by the model recomputing needs 18, ``copying`` so many and all of the host budget."""
    unit = UnitOptions(
        name="u",
        options=(
            option(SAVE, 0.0, 2, 15, 0),
            option(RECOMPUTE, 3.0, 0, 18, 0),
            option(OFFLOAD, 1.0, 0, copying, 0).model_copy(update={"host": 4}),
        ),
    )
    point = Point(base=0, prefix=0, own=0, phase="forward")
    return Problem(units=(unit,), points=(point,), budget_bytes=15, base_seconds=10.0, host_budget=4)


def test_an_option_that_takes_the_host_to_its_last_byte_is_tried():
    def torn(plan) -> Checked:
        return Checked(20 if plan["u"] == SAVE else 10, host_bytes=4 * (plan["u"] == OFFLOAD))

    assert refine(with_a_host(14), torn).choices == {"u": OFFLOAD}


def test_an_infeasible_answer_still_fits_the_host():
    def crowded(plan) -> Checked:
        copied = plan["u"] == OFFLOAD
        return Checked(20 if copied else 25, host_bytes=5 * copied)

    refined = refine(with_a_host(14), crowded)
    assert not refined.feasible and refined.choices != {"u": OFFLOAD}
