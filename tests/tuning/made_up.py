"""Searches on the made-up device, with their answers as plain data."""

from __future__ import annotations

from typing import Any

from autockpt.schema import Silence, dump_choice, load_space, parse_budget
from autockpt.tuning.engine import Engine
from autockpt.tuning.job import Clock, Limits
from autockpt.tuning.scoring import RealSteps, Simulated
from tests.tuning.device import MadeUpDevice


def search_made_up(space: str, budget: str, units: int, *, simulated: bool) -> dict[str, Any]:
    """The best plan's bytes and seconds, and the plan."""
    device, clock = MadeUpDevice(units), Clock(Silence())
    engine = Engine(
        profiled=device.profiled(),
        scorer=Simulated() if simulated else RealSteps(device, clock),
        budget=parse_budget(budget),
        space=load_space(space),
        limits=Limits(20),
        run=None,
        storage="sqlite://",
        clock=clock,
    )
    found = engine.run()
    assert found.best is not None and found.best.score is not None
    return {
        "budget_bytes": found.budget.bytes,
        "peak_bytes": found.best.score.peak_bytes,
        "step_seconds": found.best.score_seconds,
        "plan": {name: dump_choice(choice) for name, choice in found.best.choices.items()},
    }
