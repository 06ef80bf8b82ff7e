"""Op times are measured once, and no more of them than time allows."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autockpt.cost import build_profile, measure_op_times, uniform_graphs
from autockpt.cost.roofline import roofline_times
from autockpt.cost.simulation import simulate
from autockpt.errors import ConflictError, DeviceOutOfMemory, MeasurementError
from autockpt.schema import OFFLOAD, Choice, Graph, Measurement, OpTimes, WorkloadSpec
from autockpt.shipped import load_hardware
from autockpt.solvers.problem import seconds_of
from autockpt.tracing import Tracer
from tests.cost.made_up import by_phase
from tests.cost.steps import SECONDS
from tests.errors import raises
from tests.tuning.device import MadeUpDevice


class Machine(MadeUpDevice):
    """Times ops; ``stopped`` while it times whole plans. It may refuse a choice."""

    refuses: Choice | None = None
    measured: Mapping[str, Measurement] = {}

    def __init__(self, stopped: bool = False) -> None:
        super().__init__(2)
        self.stopped, self.asked = stopped, 0

    def trace(self, choices: Mapping[str, Any] | None = None) -> Graph:
        if self.refuses in (choices or {}).values():
            raise ConflictError("made up", remedy="None.")
        return super().trace(choices)

    def call(self, ref: str, payload: dict) -> dict:
        self.asked += 1
        single = {name: seconds for name, seconds in SECONDS.items() if name != "opt"}  # the optimizer is timed whole
        return {"seconds": single, "optimizer_seconds": 3.0, "copy_out_bandwidth": 40.0, "copy_in_bandwidth": 40.0}

    def measure(self, choices: Mapping[str, Any], *, steps: int) -> Measurement:
        if self.stopped:
            raise KeyboardInterrupt
        return Measurement(peak_bytes=1, step_seconds=50.0 + len(choices.values()), steps=steps)

    def op_times(self, left: float = math.inf) -> OpTimes | None:
        uniform = self.uniform(("save", "recompute", "offload"))
        times, self.measured = measure_op_times(self, uniform, "a workload", room=1 << 30, left=lambda: left)
        return times


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path))


def test_ops_that_were_timed_are_not_timed_again() -> None:
    first, second = Machine(), Machine(stopped=True)
    times = first.op_times()
    assert second.op_times() == times and (first.asked, second.asked) == (1, 0)
    assert [*first.measured] == ["save", "recompute", "offload"] and not second.measured


def test_op_times_are_kept_where_one_rank_alone_runs_out_of_memory() -> None:
    """No step can be taken after it, until all ranks are started again."""

    class Rank(Machine):
        broken = False

        def measure(self, choices: Mapping[str, Any], *, steps: int) -> Measurement:
            assert not self.broken
            self.broken = True
            error = DeviceOutOfMemory("on rank 1")
            error.last = MeasurementError("no other step")
            raise error

    first, second = Rank(), Rank()
    times = first.op_times()
    assert times is not None and not first.measured
    assert second.op_times() == times and (first.asked, second.asked) == (1, 0)


def test_with_no_time_left_nothing_is_timed() -> None:
    machine = Machine(stopped=True)
    assert machine.op_times(left=0.0) is None and machine.asked == 0


def test_with_little_time_whole_plans_wait_for_the_next_search() -> None:
    machine, later = Machine(stopped=True), Machine()
    rough = machine.op_times(left=1e-3)
    assert rough is not None and later.op_times() != rough and (machine.asked, later.asked) == (1, 1)
    assert later.measured and not machine.measured


def test_when_late_only_what_plans_need_is_ghost_run() -> None:
    machine = Machine()
    everything = machine.uniform(("save", "recompute", "offload"))
    made = build_profile(machine, machine.believed(), everything, late=lambda: True)
    assert [[item.choice.kind for item in menu.items] for menu in made.profile.menus] == [["save", "recompute"]]


def test_a_conflict_of_one_layer_is_raised() -> None:
    machine = Machine()
    everything = machine.uniform(("save", "recompute"))
    machine.refuses = OFFLOAD
    with raises(ConflictError, "made up"):
        build_profile(machine, machine.believed(), everything, extra=[OFFLOAD])


@pytest.mark.slow
def test_recomputing_beside_collectives_costs_what_the_whole_step_sees() -> None:
    hardware = load_hardware("rtx4090").model_copy(update={"peer_seconds": 0.01})  # slow enough to be waited for
    spec = WorkloadSpec(model="tests.measuring.sharded_models:whole", shard=2)
    with Tracer.from_spec(spec, hardware=hardware) as tracer:
        uniform = uniform_graphs(tracer, tracer.units, ("save", "recompute"))
        model = build_profile(tracer, roofline_times(hardware, [graph for _, graph in uniform.values()]), uniform)
    plan, problem = uniform["recompute"][0], model.problem(1 << 40)
    seen = (model.predictor.predict(plan).step_seconds or 0.0) - model.profile.save_all_seconds
    again = by_phase(simulate(uniform["recompute"][1], model.profile.op_times))["recompute"]
    assert seconds_of(problem, plan) == pytest.approx(seen) and seen < 0.9 * again
