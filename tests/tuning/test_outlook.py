"""Plans for other budgets than the one that was asked for."""

from __future__ import annotations

from dataclasses import replace

from autockpt.schema import Choice, plan_hash
from autockpt.schema.choices import Offload
from autockpt.schema.space import HIDDEN_COPIES
from autockpt.tuning.loop import SearchResult
from autockpt.tuning.outlook import plans_around
from tests.tuning.device import MadeUpDevice
from tests.tuning.made_up import search


def around(hidden: float) -> tuple[list[dict[str, Choice]], SearchResult]:
    """Plans for other budgets where the answer hides copies for that share of a link's time that takes twice as long as
    a layer's forward."""
    profiled = MadeUpDevice(8).profiled()
    times = profiled.profile.op_times.model_copy(update={"copy_out_bandwidth": 5.0})
    profiled = replace(profiled, profile=profiled.profile.model_copy(update={"op_times": times}))
    found = search(MadeUpDevice(8), "60%act", simulated=True)
    assert found.best is not None
    answer = found.best.model_copy(update={"parameters": {HIDDEN_COPIES: hidden}})
    return list(plans_around(profiled, found.trials, answer, found.budget.bytes)), found


def test_plans_are_proposed_on_both_sides_of_the_budget() -> None:
    plans, found = around(0.0)
    peaks = [MadeUpDevice(8).true_peak(plan) for plan in plans]
    assert min(peaks) < found.budget.bytes < max(peaks) and len({plan_hash(plan) for plan in plans}) >= 4


def test_other_budgets_hide_copies_where_the_answer_does() -> None:
    hidden, plain = (
        {c.window for plan in around(share)[0] for c in plan.values() if isinstance(c, Offload)} for share in (1.0, 0.0)
    )
    assert max(hidden) > 1 and max(plain, default=1) == 1
