"""Plans for other budgets than the one that was asked for."""

from __future__ import annotations

from autockpt.schema.choices import Offload
from autockpt.schema.space import HIDDEN_COPIES
from autockpt.tuning.outlook import ForeseenPlan, OtherBudgets
from tests.tuning.device import MadeUpDevice
from tests.tuning.made_up import search


def walked(hidden: float) -> list[ForeseenPlan]:
    """Where the answer hides copies for that share of a link's time that takes twice as long as a layer's forward."""
    profiled = MadeUpDevice(8).profiled()
    times = profiled.profile.op_times.model_copy(update={"copy_out_bandwidth": 5.0})
    profile = profiled.profile.model_copy(update={"op_times": times})
    found = search(MadeUpDevice(8), "60%act", simulated=True)
    assert found.best is not None
    answer = found.best.model_copy(update={"parameters": {HIDDEN_COPIES: hidden}})
    trials = [answer if trial.plan_hash == answer.plan_hash else trial for trial in found.trials]
    model = OtherBudgets.of(trials, profile, profiled.base, answer.plan_hash, None, ())
    assert model is not None and model.least <= found.smallest_peak
    plans = model.walk()
    peaks = [foreseen.peak for foreseen in plans]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < found.budget.bytes < peaks[0]
    return plans


def windows(plans: list[ForeseenPlan]) -> set[int]:
    return {c.window for plan in plans for c in plan.choices.values() if isinstance(c, Offload)}


def test_copies_hide_in_plans_for_other_budgets_where_they_do_in_the_answer() -> None:
    hidden, plain = walked(1.0), walked(0.0)
    assert max(windows(hidden)) > 1 and max(windows(plain), default=1) == 1
    fastest = [min(plan.seconds for plan in plans if plan.peak < plain[0].peak) for plans in (hidden, plain)]
    assert fastest[0] < fastest[1]
