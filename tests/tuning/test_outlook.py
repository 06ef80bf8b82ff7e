"""Plans for other budgets than the one that was asked for."""

from dataclasses import replace

from autockpt.schema import Choice, Measurement, Prediction, Trial, plan_hash
from autockpt.schema.choices import Offload
from autockpt.schema.trial import GhostAnswer, Outlook
from autockpt.tuning.loop import Loop
from autockpt.tuning.outlook import plans_around, trade
from autockpt.tuning.trials import HIDDEN_COPIES
from tests import samples
from tests.tuning.device import MadeUpDevice
from tests.tuning.made_up import search

MIB = 2**20


def around(hidden: float) -> tuple[list[dict[str, Choice]], Loop]:
    """Plans for other budgets where the answer hides copies for that share of a link's time that takes twice as long as
    a layer's forward."""
    profiled = MadeUpDevice(8).profiled()
    times = profiled.profile.op_times.model_copy(update={"copy_out_bandwidth": 5.0})
    profiled = replace(profiled, profile=profiled.profile.model_copy(update={"op_times": times}))
    found = search(MadeUpDevice(8), "60%act", simulated=True)
    assert found.best is not None
    answer = found.best.model_copy(update={"parameters": {HIDDEN_COPIES: hidden}})
    return list(plans_around(profiled, found.trials.all, answer, found.budget.bytes)), found


def test_plans_are_proposed_on_both_sides_of_the_budget() -> None:
    plans, found = around(0.0)
    peaks = [MadeUpDevice(8).true_peak(plan) for plan in plans]
    assert min(peaks) < found.budget.bytes < max(peaks) and len({plan_hash(plan) for plan in plans}) >= 4


def test_other_budgets_hide_copies_where_the_answer_does() -> None:
    hidden, plain = (
        {c.window for plan in around(share)[0] for c in plan.values() if isinstance(c, Offload)} for share in (1.0, 0.0)
    )
    assert max(hidden) > 1 and max(plain, default=1) == 1


def trial(number: int, seconds: float, peak_bytes: int, noise: float = 0.003) -> Trial:
    return samples.trial(number, measured=Measurement(peak_bytes=peak_bytes, step_seconds=seconds, noise=noise))


def test_the_leanest_plan_that_is_hardly_slower_is_offered() -> None:
    """Not for a little room, much time, or an uncertain time; and what lies within the noise is no price."""
    best, lean, slow = trial(0, 1.0, 90 * MIB), trial(1, 1.005, 60 * MIB), trial(2, 1.2, 10 * MIB)
    said = trade(best, [best, lean, slow], None, 100 * MIB)
    assert "30.0 MiB" in said and "+0.5 %" in said and "60.0 MiB" in said and "±" in said
    uncertain = trial(3, 1.0, 50 * MIB, noise=0.19)
    said = trade(best, [best, trial(1, 0.999, 60 * MIB), uncertain], None, 100 * MIB)
    assert "30.0 MiB" in said and "-0.1 %" not in said and "±" in said
    assert not trade(best, [best, trial(1, 1.005, 89 * MIB), slow, uncertain], None, 100 * MIB)


def test_in_a_simulation_other_budgets_are_a_trade_too() -> None:
    predicted = Prediction(peak_bytes=90 * MIB, step_seconds=1.0)
    best = trial(0, 1.0, 90 * MIB).model_copy(update={"state": "simulated", "measured": None, "predicted": predicted})
    lean = GhostAnswer(choices={}, predicted=Prediction(peak_bytes=50 * MIB, step_seconds=1.004))
    assert "40.0 MiB" in trade(best, [best], Outlook(plans=(lean,)), 100 * MIB)
    measured = trial(0, 1.0, 90 * MIB)
    assert not trade(measured, [measured], Outlook(plans=(lean,)), 100 * MIB), "predicted is not measured"
