import itertools

import pytest

from autockpt.analysis.why import PredictedPlans, budget_rows, searched, why
from autockpt.cost import CostModel
from autockpt.schema import ResolvedBudget, SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from autockpt.tuning.clock import Clock
from autockpt.tuning.targets.simulated import Simulated
from autockpt.tuning.trials import Trials
from tests.tuning.device import MadeUpDevice


@pytest.fixture(scope="module")
def half() -> tuple[CostModel, PredictedPlans, Trials]:
    made = MadeUpDevice(4).profiled()
    space = SearchSpace().restricted(("save", "recompute", "offload"))
    spec = WorkloadSpec(model="made up")
    request = SearchRequest(budget=parse_budget("50%act"), workload=spec, space=space, simulate=True)
    return made, *searched(request, made, Simulated(request, Clock(Silence())))


def test_neighbours_lie_on_both_sides(half: tuple[CostModel, PredictedPlans, Trials]) -> None:
    _, known, trials = half
    assert trials.best is not None
    told = why(known, trials.best.choices, None)
    assert told.leaner is not None and told.faster is not None
    assert told.leaner.peak_bytes < told.chosen.peak_bytes < told.faster.peak_bytes
    assert told.leaner.step_seconds > told.chosen.step_seconds > told.faster.step_seconds


def test_a_wasteful_plan_is_told_of_a_better_one(half: tuple[CostModel, PredictedPlans, Trials]) -> None:
    _, known, _ = half
    told = why(known, known.lean.choices, known.save_all.peak_bytes)
    assert told.best is not None and told.best.step_seconds < told.chosen.step_seconds


def test_budgets_in_steps(half: tuple[CostModel, PredictedPlans, Trials]) -> None:
    _, known, _ = half
    low, high = known.lean.peak_bytes, known.save_all.peak_bytes
    assert known.save_all.overhead == pytest.approx(0.0)
    ours = (low + high) // 2 + 1
    chosen = known.at(ours)
    assert chosen is not None
    as_fast = chosen.model_copy(update={"step_seconds": chosen.step_seconds * 1.002})
    steps = budget_rows(known, ResolvedBudget(asked="24GB", bytes=ours), as_fast)
    assert [s.reach for s in steps if s.ours] == [as_fast]
    sizes = [s.budget_bytes for s in steps]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == low
    assert [s.budget_bytes for s in steps if s.ours] == [ours]
    overheads = [s.reach.overhead for s in steps if s.reach and s.reach.overhead is not None]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(overheads)), "less memory is never faster"
    hopeless = budget_rows(known, ResolvedBudget(asked="1KB", bytes=1), chosen)
    assert hopeless[-1].reach is None and hopeless[-1].ours
