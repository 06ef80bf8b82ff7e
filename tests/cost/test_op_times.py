"""Timing by an accelerator's events, with clocks in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

from autockpt.cost import op_times
from tests.accelerator import KIND
from tests.runtime.processes import needs_gloo

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


@pytest.fixture
def one_rank(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@needs_gloo
def test_a_collective_takes_from_when_all_ranks_are_there_until_its_end(one_rank):
    there = []
    timer = op_times.OpTimer(torch.device("cpu"), lambda: there.append(len(timer.seconds)))
    with timer:
        x = torch.ones(3) * 2
        distributed.all_reduce(x)
        y = functional.all_reduce(x, "sum", distributed.group.WORLD)
        assert (y + 1).tolist() == [3.0] * 3
    assert len(there) == 2  # waiting for the second's end is no collective
    joint = [name for name in timer.seconds if name.startswith(("c10d.allreduce_", "_c10d_functional.all_reduce"))]
    assert len(joint) == 2 and all(timer.seconds[name][0] > 0 for name in joint)
