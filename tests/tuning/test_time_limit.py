"""A search keeps its time limit whatever its stages take, on a clock that only made-up steps and ghost runs move."""

from collections.abc import Mapping
from typing import Any

import pytest

from autockpt.cost import CostModel
from autockpt.errors import TimeLimitReached
from autockpt.schema import Choice, Graph, Measurement, Silence
from autockpt.tuning.clock import Clock
from tests.tuning.device import MadeUpDevice
from tests.tuning.made_up import search


class SlowDevice(MadeUpDevice):
    """Cycles take ``cycle`` seconds and ghost runs ``ghost``; as a worker it is ended in the middle of a step."""

    def __init__(self, cycle: float, ghost: float, timeout: float) -> None:
        super().__init__(noise=0.01)
        self.cycle, self.ghost, self.now, self.compared = cycle, ghost, 0.0, 0
        self.clock = Clock(Silence(), timeout)

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        self.now += self.ghost
        return super().trace(choices)

    def profiled(self, *args: Any, **more: Any) -> CostModel:
        profiled, self.now = super().profiled(*args, **more), 0.0
        return profiled

    def spend(self, cycles: int) -> None:
        if cycles * self.cycle > self.clock.seconds_until_stopped:
            self.now += max(0.0, self.clock.seconds_until_stopped)
            raise TimeLimitReached("the worker was ended")
        self.now += cycles * self.cycle

    def measure(self, choices: Mapping[str, Choice], *, steps: int = 5, budget_bytes: int | None = None) -> Measurement:
        self.spend(steps + 2)
        return super().measure(choices, steps=steps, budget_bytes=budget_bytes)

    def compare(self, plans: Mapping[str, Any], *, rounds: int = 5, **more: Any) -> dict[str, list[float]]:
        self.spend(2 * rounds * len(plans))
        self.compared += rounds
        return super().compare(plans, rounds=rounds, **more)

    def true_seconds(self, choices: Mapping[str, Choice]) -> float:
        now, plain = self.now, super().true_seconds({})
        seconds, self.now = self.cycle * super().true_seconds(choices) / plain, now
        return seconds

    def true_peak(self, choices: Mapping[str, Choice]) -> int:
        now, peak = self.now, super().true_peak(choices)
        self.now = now
        return peak


@pytest.fixture(autouse=True)
def device_time(monkeypatch: pytest.MonkeyPatch) -> list[SlowDevice]:
    """The device whose time all clocks show."""
    devices: list[SlowDevice] = []
    monkeypatch.setattr(Clock, "elapsed", property(lambda clock: devices[-1].now))
    return devices


@pytest.mark.parametrize("timeout", [20.0, 90.0])
@pytest.mark.parametrize("ghost", [0.01, 2.0])
@pytest.mark.parametrize("cycle", [0.2, 2.0, 8.0])
def test_no_stage_exceeds_the_time_limit_by_much(
    device_time: list[SlowDevice], cycle: float, ghost: float, timeout: float
) -> None:
    device = SlowDevice(cycle, ghost, timeout)
    device_time.append(device)
    try:
        found = search(device, "50%act", clock=device.clock, trials=100)
    except TimeLimitReached:
        assert len(device.measured) < 3, "a plan that fits was measured"
    else:
        assert found.best is not None and found.best.feasible and found.best.measured is not None
        assert device.compared or "time limit" in found.stopped
    assert device.now <= 1.2 * timeout + 5


def test_a_time_limit_in_the_finals_names_the_best_so_far(device_time: list[SlowDevice]) -> None:
    class Stuck(SlowDevice):
        def compare(self, plans: Mapping[str, Any], *, rounds: int = 5, **more: Any) -> dict[str, list[float]]:
            self.now = self.clock.timeout or 0.0
            raise TimeLimitReached("the worker was ended")

    device = Stuck(0.5, 0.1, 300.0)
    device_time.append(device)
    found = search(device, "50%act", clock=device.clock, trials=3)
    assert found.best is not None and found.best.measured is not None and "time limit" in found.stopped
    assert not found.interrupted
