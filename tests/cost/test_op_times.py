"""Op times: by an accelerator's events, with clocks in its place, and set right by whole steps."""

from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

from autockpt.cost import op_times
from autockpt.cost.op_times import calibrated
from autockpt.cost.simulation import simulate
from autockpt.devices import get_device
from autockpt.measuring import StepRunner
from autockpt.schema import Graph, OpTimes, parse_choice
from tests.accelerator import KIND
from tests.measuring.small_workloads import make_workload
from tests.runtime.processes import needs_gloo
from tests.tuning.device import MadeUpDevice

DEVICE = torch.device(KIND, 1)
MADE_UP = MadeUpDevice(4)


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
def test_a_collective_is_timed_from_when_all_ranks_are_there(one_rank):
    there = []
    timer = op_times.OpTimer(torch.device("cpu"), lambda: there.append(len(timer.seconds)))
    with timer:
        x = torch.ones(3) * 2
        distributed.all_reduce(x)
        y = functional.all_reduce(x, "sum", distributed.group.WORLD)
        assert (y + 1).tolist() == [3.0] * 3
        functional.all_reduce_coalesced([x, y], "sum", distributed.group.WORLD)
    assert len(there) == 3  # waiting for the second's end is no collective
    joint = [name for name in timer.seconds if name.startswith(("c10d.allreduce_", "_c10d_functional.all_reduce"))]
    assert len(joint) == 3 and all(timer.seconds[name][0] > 0 for name in joint)


def uniform(*kinds: str) -> dict[str, Graph]:
    return {kind: graph for kind, (_, graph) in MADE_UP.uniform(kinds).items()}


def seconds_of(graphs, times: OpTimes, pace: float = 1.0) -> dict[str, float]:
    """What a device with these true times measures when it is slowed down by a factor of ``pace``."""
    return {kind: simulate(graph, times).step_seconds * pace for kind, graph in graphs.items()}


def test_the_optimizers_time_is_no_ops():
    runner = StepRunner(make_workload(), get_device("cpu"))
    assert "" not in op_times.measure_more_in_runner(runner, {"choices": {}})


def test_whole_steps_set_what_single_ops_do_not_tell():
    """Mixed plans are then predicted as the device runs them, whatever slows all steps."""
    truth = MADE_UP.believed(rerun_scale=1.3, copy_out_bandwidth=80.0, copy_in_bandwidth=80.0)
    graphs = uniform("save", "recompute", "offload")
    found = calibrated(MADE_UP.believed(), graphs, seconds_of(graphs, truth, pace=1.7))
    assert found.rerun_scale == pytest.approx(1.3)
    mixed = MADE_UP.trace({"layers.0": parse_choice("recompute"), "layers.2": parse_choice("offload")})
    assert simulate(mixed, found).step_seconds == pytest.approx(simulate(mixed, truth).step_seconds)


def test_a_choices_host_time_is_what_ops_do_not_explain():
    graphs = uniform("save", "recompute", "selective")
    times = seconds_of(graphs, MADE_UP.believed())
    times["selective"] += 0.5 * 4
    found = calibrated(MADE_UP.believed(), graphs, times)
    assert found.choice_seconds == pytest.approx({"selective": 0.5})
    assert found.host_seconds_of(parse_choice("selective")) == pytest.approx(0.5)
    assert found.host_seconds_of(parse_choice("keep_attention")) == pytest.approx(0.5)
    assert found.host_seconds_of(parse_choice("recompute")) == 0.0
