from __future__ import annotations

import pytest

from autockpt.cost import uniform_graphs
from autockpt.cost.op_times import calibrated
from autockpt.cost.step import simulate
from autockpt.schema import DeviceInfo, Environment, OpTimes, parse_choice
from tests.cost.steps import SECONDS, step

NAMES = [f"layers.{i}" for i in range(4)]


def op_times(*, queues: bool = False, **more) -> OpTimes:
    info = DeviceInfo(kind="cpu", name="made up", capacity_bytes=1, copy_queues=queues)
    rates = {"copy_out_bandwidth": 40.0, "copy_in_bandwidth": 20.0}
    return OpTimes(environment=Environment(device=info, versions={}), seconds=SECONDS, **(rates | more))


class Traces:
    @staticmethod
    def ahead(plans):
        """One after the other, when asked for."""

    @staticmethod
    def trace(choices=None):
        return step(NAMES, choices)


def uniform(kinds=("save", "recompute", "offload")):
    blocks = [u for u in step(NAMES).units if u.role == "block"]
    return {kind: graph for kind, (_, graph) in uniform_graphs(Traces(), blocks, kinds).items()}


def seconds_of(graphs, times: OpTimes) -> dict[str, list[float]]:
    """What a device with these true times measures, in rounds of which one is quick and one slow."""
    return {k: [simulate(g, times).step_seconds * pace for pace in (0.9, 1.7, 1.0)] for k, g in graphs.items()}


def test_whole_steps_set_what_single_ops_do_not_tell():
    """Mixed plans are then predicted as the device runs them, whatever it slows all rounds by."""
    truth = op_times(rerun_scale=1.3, copy_out_bandwidth=80.0, copy_in_bandwidth=40.0)
    graphs = uniform()
    found = calibrated(op_times(), graphs, seconds_of(graphs, truth))
    assert found.rerun_scale == pytest.approx(1.3)
    mixed = step(NAMES, {NAMES[0]: parse_choice("recompute"), NAMES[2]: parse_choice("offload")})
    assert simulate(mixed, found).step_seconds == pytest.approx(simulate(mixed, truth).step_seconds)


def test_a_choices_host_time_is_what_ops_do_not_explain():
    graphs = uniform(("save", "recompute", "selective"))
    times = seconds_of(graphs, op_times())
    times["selective"] = [
        seconds + 0.5 * len(NAMES) * pace for seconds, pace in zip(times["selective"], (0.9, 1.7, 1.0), strict=True)
    ]
    found = calibrated(op_times(), graphs, times)
    assert found.choice_seconds == pytest.approx({"selective": 0.5})
    assert found.host_seconds_of(parse_choice("selective")) == pytest.approx(0.5)
    assert found.host_seconds_of(parse_choice("keep_attention")) == pytest.approx(0.5)
    assert found.host_seconds_of(parse_choice("recompute")) == 0.0
