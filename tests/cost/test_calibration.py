from __future__ import annotations

import pytest

from autockpt.cost import uniform_graphs
from autockpt.cost.calibration import calibrated
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


def test_copies_beside_compute_keep_their_probed_rates():
    truth = op_times(queues=True, rerun_scale=0.8, copy_out_bandwidth=8.0)
    graphs = uniform()
    found = calibrated(op_times(queues=True), graphs, seconds_of(graphs, truth))
    assert found.rerun_scale == pytest.approx(0.8)
    assert (found.copy_out_bandwidth, found.copy_in_bandwidth) == (40.0, 20.0)


def test_a_host_that_an_accelerator_waits_for_is_in_what_plans_will_take():
    """What runs again keeps the host longer than its ops do; the plan with every op again was timed by itself."""
    truth = op_times(queues=True, host_seconds=0.5, rerun_scale=3.0)
    graphs = uniform()
    found = calibrated(op_times(queues=True, host_seconds=2.0), graphs, seconds_of(graphs, truth))
    assert (found.host_seconds, found.rerun_scale) == (pytest.approx(0.5), pytest.approx(3.0))
    mixed = step(NAMES, {NAMES[0]: parse_choice("recompute"), NAMES[2]: parse_choice("offload")})
    assert simulate(mixed, found).step_seconds == pytest.approx(simulate(mixed, truth).step_seconds)


@pytest.mark.parametrize("left", [(), ("save",), ("recompute", "offload")])
def test_plans_that_do_not_fit_calibrate_nothing(left):
    graphs = uniform()
    times = op_times()
    seconds = {k: v for k, v in seconds_of(graphs, op_times(rerun_scale=1.3)).items() if k in left}
    assert calibrated(times, graphs, seconds) == times


def test_noise_never_makes_a_price_absurd():
    """Recomputing or offloading measured faster than saving: prices shrink, but never below zero."""
    graphs = uniform()
    seconds = seconds_of(graphs, op_times())
    seconds |= {"recompute": [s / 3 for s in seconds["save"]], "offload": [s / 3 for s in seconds["save"]]}
    found = calibrated(op_times(), graphs, seconds)
    assert found.rerun_scale > 0 and found.copy_out_bandwidth > 0 and found.copy_in_bandwidth > 0


def test_the_host_time_of_a_choice_is_what_its_uniform_plan_takes_besides_ops():
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


def test_a_choice_that_costs_the_host_nothing_is_not_made_cheaper():
    graphs = uniform(("save", "selective"))
    quick = seconds_of(graphs, op_times())
    quick["selective"] = [0.9 * seconds for seconds in quick["selective"]]
    assert calibrated(op_times(), graphs, quick).choice_seconds == {"selective": 0.0}
