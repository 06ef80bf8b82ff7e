"""Simulated promises against measurements."""

from __future__ import annotations

import pytest

from autockpt.analysis.verify import judge_peak, judge_time
from autockpt.schema import DeviceInfo, Environment, Measurement, Plan, Prediction, ResolvedBudget, Unit
from autockpt.schema.choices import RECOMPUTE

UNITS = [Unit(name="layers.0", cls="Layer", kind=0)]


def simulated(kind: str, budget: int | None = None, headroom: int = 0) -> Plan:
    device = DeviceInfo(kind=kind, name="a card", capacity_bytes=10_000)
    return Plan.create(
        {"layers.0": RECOMPUTE},
        UNITS,
        source="simulated",
        environment=Environment(device=device, versions={}),
        predicted=Prediction(peak_bytes=1000, step_seconds=0.1),
        budget=None if budget is None else ResolvedBudget(asked="1KB", bytes=budget, headroom_bytes=headroom),
    )


def measured(peak: int) -> Measurement:
    return Measurement(peak_bytes=peak, step_seconds=0.2, noise=0.01)


@pytest.mark.parametrize(
    ("planned", "here", "peak", "budget", "state"),
    [
        ("cuda", "cuda", 1040, None, "passed"),  # 5 % for an allocator that was modelled
        ("cuda", "cuda", 1060, None, "failed"),
        ("cpu", "cpu", 1005, None, "passed"),
        ("cpu", "cpu", 1040, None, "failed"),
        ("cuda", "cuda", 1040, 1030, "failed"),
        ("cuda", "cpu", 5000, 1030, "skipped"),  # another kind of device proves nothing
    ],
)
def test_a_simulated_peak_is_compared_and_named_as_such(
    planned: str, here: str, peak: int, budget: int | None, state: str
) -> None:
    check = judge_peak(simulated(planned, budget), measured(peak), here)
    assert check.state == state
    assert "simulated" in check.detail and "a card" in check.detail and "promised" not in check.detail


def test_headroom_may_be_used_by_what_no_simulation_knew() -> None:
    assert judge_peak(simulated("cuda", 1030, headroom=10), measured(1040), "cuda").state == "passed"
    assert judge_peak(simulated("cuda", 1030, headroom=9), measured(1040), "cuda").state == "failed"


def test_a_simulated_step_time_is_shown_and_fails_nothing() -> None:
    check = judge_time(simulated("cuda"), measured(1000), same_device=False)
    assert check.state == "skipped" and "simulated 100 ms for a card (+100%)" in check.detail
