from __future__ import annotations

import itertools
from typing import Any

import pytest

from autockpt.analysis.why import Answers, budget_steps, why
from autockpt.cost import CostModel, build_profile, uniform_graphs
from autockpt.schema import OpTimes, ResolvedBudget
from autockpt.schema.choices import Offload
from autockpt.solvers import refine
from tests.cost.steps import SECONDS
from tests.tuning.device import MadeUpDevice

KINDS = ("save", "recompute", "offload")


def profiled(units: int = 4, needs: Any = None) -> CostModel:
    device = MadeUpDevice(units)
    blocks = device.trace().blocks()
    times = OpTimes(environment=device.environment, seconds=SECONDS, copy_out_bandwidth=25.0, copy_in_bandwidth=25.0)
    return build_profile(device, times, uniform_graphs(device, blocks, KINDS), needs=needs)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(profiled(), KINDS)


def all_plans(p: CostModel) -> list[tuple[int, float]]:
    """Peak and seconds of every assignment, by its own ghost run."""
    names = [u.name for u in p.blocks]
    options = [o.choice for o in p.problem(0).units[0].options]
    found = []
    for combination in itertools.product(options, repeat=len(names)):
        said = p.predictor.predict(dict(zip(names, combination, strict=True)))
        found.append((said.peak_bytes, said.step_seconds or 0.0))
    return found


def test_answers_are_the_fastest_that_fit(answers: Answers) -> None:
    plans = all_plans(answers.profiled)
    assert answers.save_all.overhead == pytest.approx(0.0)
    assert answers.lean.peak_bytes == min(peak for peak, _ in plans)
    for share in (0.2, 0.5, 0.9):
        low, high = answers.lean.peak_bytes, answers.save_all.peak_bytes
        budget = int(low + share * (high - low))
        found = answers.at(budget)
        assert found is not None and found.peak_bytes <= budget
        assert found.step_seconds <= min(s for p, s in plans if p <= budget) * 1.02
    assert answers.at(answers.lean.peak_bytes - 1) is None


def test_copies_hide_as_in_a_search() -> None:
    device = MadeUpDevice(8)
    info = device.environment.device.model_copy(update={"copy_queues": True})
    environment = device.environment.model_copy(update={"device": info})
    times = OpTimes(environment=environment, seconds=SECONDS, copy_out_bandwidth=5.0, copy_in_bandwidth=1000.0)
    made = build_profile(device, times, uniform_graphs(device, device.trace().blocks(), KINDS))
    answers = Answers(made, KINDS)
    budget = (answers.lean.peak_bytes + answers.save_all.peak_bytes) // 2
    found, without = answers.at(budget), refine(made.problem(budget - answers.overhead), made.check)
    assert found is not None and found.peak_bytes <= budget and without.feasible
    assert found.step_seconds < answers.reach(without.choices).step_seconds
    assert max(choice.window for choice in found.choices.values() if isinstance(choice, Offload)) > 1


def test_neighbours_lie_on_both_sides(answers: Answers) -> None:
    low, high = answers.lean.peak_bytes, answers.save_all.peak_bytes
    found = answers.at((low + high) // 2)
    assert found is not None
    told = why(answers, found.choices, None)
    assert told.leaner is not None and told.faster is not None and told.best is None
    assert told.leaner.peak_bytes < told.chosen.peak_bytes < told.faster.peak_bytes
    assert told.leaner.step_seconds > told.chosen.step_seconds > told.faster.step_seconds


def test_a_wasteful_plan_is_told_of_a_better_one(answers: Answers) -> None:
    told = why(answers, answers.lean.choices, answers.save_all.peak_bytes)
    assert told.best is not None and told.best.step_seconds < told.chosen.step_seconds


def test_budgets_in_steps(answers: Answers) -> None:
    low, high = answers.lean.peak_bytes, answers.save_all.peak_bytes
    ours = (low + high) // 2 + 1
    steps = budget_steps(answers, ResolvedBudget(asked="24GB", bytes=ours))
    sizes = [s.budget_bytes for s in steps]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == low
    assert [s.label for s in steps if s.ours] == ["24GB"] and ours in sizes
    overheads = [s.reach.overhead for s in steps if s.reach and s.reach.overhead is not None]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(overheads)), "less memory is never faster"
    less = ResolvedBudget(asked="24GB", bytes=ours, headroom="5%", headroom_bytes=1)
    assert [s.label for s in budget_steps(answers, less) if s.ours] == ["24GB less 5%"]
    hopeless = budget_steps(answers, ResolvedBudget(asked="1KB", bytes=1))
    assert hopeless[-1].reach is None and hopeless[-1].ours
