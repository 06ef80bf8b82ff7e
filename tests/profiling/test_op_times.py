"""Timing ops by CUDA events, with clocks in the place of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autockpt.profiling import op_times


class Gpu:
    """Every op takes 3 ms. Notes how often it was given something to wait for."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        gpu = self

        class Event:
            def record(self) -> None:
                gpu.now += 1.5
                self.at = gpu.now

            def elapsed_time(self, end: Any) -> float:
                return 2 * (end.at - self.at)

        return Event()

    def sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.waits += 1


def test_ops_are_timed_by_events_with_the_gpu_kept_behind_the_host(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = op_times._OpTimer(cuda=True)
    x = torch.ones(3)
    with timer:
        for _ in range(op_times.OPS_AHEAD + 1):
            x = x * 2
        timer.mark("optimizer")
        x.add_(1)
    timer.finish()
    (times,) = timer.seconds.values()
    assert len(times) == timer.ops == op_times.OPS_AHEAD + 1
    assert times == pytest.approx([3e-3] * len(times))
    assert timer.optimizer == pytest.approx(3e-3)
    assert gpu.waits == 2
