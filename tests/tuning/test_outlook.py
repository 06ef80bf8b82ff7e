"""Plans for other budgets than the one that was asked for."""

from __future__ import annotations

from autockpt.schema import Measurement, Prediction, Trial
from autockpt.schema.choices import Offload
from autockpt.schema.outlook import GhostAnswer, Outlook
from autockpt.schema.space import HIDDEN_COPIES
from autockpt.tuning.outlook import ForeseenPlan, OtherBudgets, trade
from tests.tuning.device import MadeUpDevice
from tests.tuning.made_up import search

MIB = 2**20


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


def trial(number: int, seconds: float, peak_bytes: int) -> Trial:
    measured = Measurement(peak_bytes=peak_bytes, step_seconds=seconds, noise=0.003)
    facts = {"encoding": "knobs", "plan_hash": str(number), "state": "measured", "feasible": True}
    return Trial.model_validate({"number": number, "name": "", "choices": {}, "measured": measured, **facts})


def test_a_plan_with_much_more_room_that_is_hardly_slower_is_offered() -> None:
    best, lean, slow = trial(0, 1.0, 90 * MIB), trial(1, 1.005, 60 * MIB), trial(2, 1.2, 10 * MIB)
    said = trade(best, [best, lean, slow], None, 100 * MIB)
    assert "30.0 MiB" in said and "+0.5 %" in said and "60.0 MiB" in said and "±" in said


def test_no_trade_is_offered_for_a_little_room_or_much_time() -> None:
    best = trial(0, 1.0, 90 * MIB)
    assert not trade(best, [best, trial(1, 1.005, 89 * MIB), trial(2, 1.2, 10 * MIB)], None, 100 * MIB)


def test_in_a_simulation_other_budgets_are_a_trade_too() -> None:
    predicted = Prediction(peak_bytes=90 * MIB, step_seconds=1.0)
    best = trial(0, 1.0, 90 * MIB).model_copy(update={"state": "simulated", "measured": None, "predicted": predicted})
    lean = GhostAnswer(choices={}, predicted=Prediction(peak_bytes=50 * MIB, step_seconds=1.004))
    assert "40.0 MiB" in trade(best, [best], Outlook(plans=(lean,)), 100 * MIB)
    measured = trial(0, 1.0, 90 * MIB)
    assert not trade(measured, [measured], Outlook(plans=(lean,)), 100 * MIB), "predicted is not measured"
