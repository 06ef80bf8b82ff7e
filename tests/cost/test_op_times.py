"""Timing by an accelerator's events, with clocks in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autockpt.cost import op_times
from tests.accelerator import KIND

DEVICE = torch.device(KIND, 1)


class Gpu:
    """Every op takes 3 ms. Notes how often it was given something to wait for."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0
        self.ended = 0.0

    def event(self, device: torch.device, enable_timing: bool) -> Any:
        assert enable_timing and device == DEVICE
        gpu = self

        class Event:
            def record(self, stream: Any) -> None:
                assert stream.name == "compute 1"
                gpu.now += 1.5
                self.at = gpu.now

            def synchronize(self) -> None:
                gpu.ended = gpu.now

            def elapsed_time(self, end: Any) -> float:
                return 2 * (end.at - self.at)

        return Event()

    def sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.waits += 1


@pytest.fixture
def gpu(accelerator, monkeypatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch, "Event", made.event)
    accelerator.module._sleep = made.sleep
    return made


def test_ops_are_timed_by_events_behind_the_host(gpu):
    timer = op_times.OpTimer(DEVICE)
    x = torch.ones(3)
    with timer:
        for _ in range(op_times.OPS_AHEAD + 1):
            x = x * 2
        timer.mark("optimizer")
        x.add_(1)
    timer.finish()
    assert timer.seconds.pop("") == pytest.approx([3e-3]), "the optimizer's"
    (times,) = timer.seconds.values()
    assert len(times) == op_times.OPS_AHEAD + 1 and times == pytest.approx([3e-3] * len(times))
    assert gpu.waits == 2
