from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.analysis import verify as run
from autockpt.analysis.verify import Check, VerifyReport, judge_peak, judge_time, verify
from autockpt.devices import get_device
from autockpt.errors import DeviceOutOfMemory, PlanError
from autockpt.measuring import StepRunner
from autockpt.measuring.compiler import Compiler
from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Comparison,
    DeviceInfo,
    Environment,
    Measurement,
    Plan,
    Prediction,
    ResolvedBudget,
    Silence,
    Unit,
    WorkloadSpec,
)
from autockpt.workload import Step, discover_units
from tests.measuring.small_workloads import RECOMPUTE_ALL, Stack, make_workload
from tests.policies.zoo import CASES, Tally

pytestmark = pytest.mark.slow

HERE = DeviceInfo(kind="cpu", name="here", capacity_bytes=1)


def workload(name: str = "llama", **more: Any):
    case = CASES[name]
    step = case.step if name in ("cnn", "sequential") else None
    model = case.make()
    return Step(model, case.batch(), loss=step, **more)


class Beside:
    """A measurer in this process, whose numbers are made up and whose steps are real."""

    def __init__(self, work, seconds: float = 1.0, plain_fits: bool = True) -> None:
        self.runner = StepRunner(work, get_device("cpu"))
        self.environment = Environment(device=HERE, versions={})
        self.seconds, self.plain_fits = seconds, plain_fits
        self.reference = 1.0

    def measure(self, choices, *, steps=5, budget_bytes=None):
        if budget_bytes is not None and budget_bytes < 50:
            raise DeviceOutOfMemory("too much")
        return Measurement(peak_bytes=100, step_seconds=self.seconds, noise=0.01, steps=steps)

    def compare(self, plans, *, rounds=5, budget_bytes=None):
        if "none" in plans and not self.plain_fits:
            raise DeviceOutOfMemory("too much")
        return {name: [self.seconds if name == "plan" else self.reference] * rounds for name in plans}

    def call(self, ref, payload):
        if not self.plain_fits and ref.endswith("observe_steps") and payload["choices"] is None:
            raise DeviceOutOfMemory("plain training ran out of memory")
        return self.runner.call(ref, payload)


def verified(plan: Plan, by: Beside, **more: Any) -> VerifyReport:
    """The report on a plan by a measurer of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_open", lambda *_: nullcontext(by))
        return verify(plan, by.runner.workload, **more)


def checks(report) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


def promised(work, choices, peak: int = 100, seconds: float = 1.0, **more: Any) -> Plan:
    units = discover_units(work.model)
    full = {u.name: choices.get(u.name, SAVE) for u in units if u.role == "block"}
    return Plan.create(
        full,
        units,
        source="measured",
        measured=Measurement(peak_bytes=peak, step_seconds=seconds, noise=0.01),
        environment=Environment(device=HERE, versions={}),
        **more,
    )


@pytest.mark.parametrize("name", CASES)
def test_real_plans_keep_their_promise(name):
    work = workload(name)
    names = [u.name for u in discover_units(work.model) if u.role == "block"]
    plan = promised(work, {n: (RECOMPUTE, OFFLOAD, SAVE)[i % 3] for i, n in enumerate(names)})
    report = verified(plan, Beside(work))
    assert checks(report) == dict.fromkeys(("gradients", "sentinels", "peak", "step time"), "passed")
    assert report.passed
    assert "bit-equal with plain training" in report.checks[0].detail
    assert all(p.grad is None for p in work.model.parameters())


def test_a_live_workload_is_measured_here_and_restored():
    work = workload(optimizer=None)
    before = {n: t.clone() for n, t in work.model.state_dict().items()}
    report = verify(Plan(choices={"**": RECOMPUTE}), work, steps=1)
    assert checks(report) == {"gradients": "passed", "sentinels": "passed", "peak": "skipped", "step time": "skipped"}
    assert report.passed
    assert "the plan was written by hand" in report.notes[0]
    assert all(torch.equal(t, before[n]) for n, t in work.model.state_dict().items())


def test_steps_on_a_cpu_for_another_device_are_announced_before_the_first():
    events: list[str] = []

    class Recorded(Silence):
        def stage(self, name: str, total: int | None = None) -> None:
            events.append("stage")

        def note(self, text: str) -> None:
            events.append(text)

    card = Environment(device=DeviceInfo(kind="cuda", name="a card", capacity_bytes=1), versions={})
    plan = Plan(choices={"**": RECOMPUTE}, environment=card)
    report = verify(plan, workload(optimizer=None), listener=Recorded(), steps=1)
    assert report.passed and "a card" in events[0] and "CPU" in events[0] and set(events[1:]) == {"stage"}


DRIFT = Tally()


class Drift(nn.Module):
    """Gives other results each time it runs."""

    def forward(self, x):
        DRIFT.calls += 1
        return torch.sigmoid(x * (1 + DRIFT.calls % 3))


def test_wrong_gradients_fail():
    DRIFT.calls = 0
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Drift()) for _ in range(2)))
    work = Step(model, torch.randn(3, 4), loss=lambda m, b: m(b).sum())

    class EvenSteps(Beside):
        def call(self, ref, payload):
            DRIFT.calls = 0  # so that plain training repeats itself
            return super().call(ref, payload)

    report = verified(Plan(choices={"0": RECOMPUTE}), EvenSteps(work))
    assert checks(report)["gradients"] == "failed"
    assert "values differ from plain training" in report.checks[0].detail
    assert checks(report)["sentinels"] == "failed"


def test_where_plain_training_does_not_fit() -> None:
    work = workload()
    report = verified(promised(work, {"model.layers.0": OFFLOAD}), Beside(work, plain_fits=False))
    assert checks(report) == dict.fromkeys(("gradients", "sentinels", "peak", "step time"), "passed")
    assert "recomputing every layer" in report.checks[0].detail
    assert "Plain training does not fit" in report.notes[0]


def test_plans_that_cannot_be_verified():
    for_many = Plan(choices={"**": RECOMPUTE}, workload=WorkloadSpec(model="llama-tiny", shard=8, keep_gradients=True))
    with pytest.raises(PlanError):
        verify(for_many)
    with pytest.raises(PlanError):
        verify(Plan(choices={"**": RECOMPUTE}))
    work = workload()
    with pytest.raises(PlanError):
        verified(Plan(choices={"encoder.0": RECOMPUTE}), Beside(work))
    with pytest.raises(PlanError):
        verified(promised(workload("gpt2"), {}), Beside(work))


def test_another_job_is_noted_once_and_has_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    work, own = workload(), WorkloadSpec(model="llama-tiny")
    plan = promised(work, {"model.layers.0": RECOMPUTE}, workload=own)
    monkeypatch.setattr(run, "_open", lambda *_: nullcontext(Beside(work)))
    report = verify(plan, own.model_copy(update={"batch_size": 2}))
    assert report.notes == (run.OTHER_WORKLOAD,) and checks(report)["peak"] == "skipped"


def test_verdicts_on_the_peak():
    work = workload()
    plan = promised(work, {}, peak=1000, budget=ResolvedBudget(asked="2000B", bytes=2000))

    def state(peak: int, plan: Plan = plan) -> str:
        return judge_peak(plan, Measurement(peak_bytes=peak, step_seconds=1.0)).state

    assert [state(p) for p in (900, 1009, 1020, 2001)] == ["passed", "passed", "failed", "failed"]
    by_hand = Plan(choices={"a": RECOMPUTE})
    assert state(10**9, by_hand) == "skipped"
    budgeted = by_hand.model_copy(update={"budget": ResolvedBudget(asked="2000B", bytes=2000)})
    assert [state(p, budgeted) for p in (1999, 2001)] == ["passed", "failed"]


@pytest.mark.parametrize("plain_fits", [True, False])
def test_a_machine_that_is_slower_today_is_no_broken_promise(plain_fits):
    """Half the speed for the plan and for the plan everybody knows: as promised. For the plan alone: not."""
    work = workload()
    rows = [
        Comparison(name=name, verdict="fits", measured=Measurement(peak_bytes=200, step_seconds=seconds, noise=0.01))
        for name, seconds in (("none", 0.8), ("recompute all", 1.0))
    ]
    plan = promised(work, {"model.layers.0": RECOMPUTE}, seconds=1.0, baselines=rows)
    runs = Beside(work, seconds=2.0, plain_fits=plain_fits)
    today = 2.0 * (0.8 if plain_fits else 1.0)
    for reference, state in ((today, "passed"), (today / 2, "failed")):
        runs.reference = reference
        check = verified(plan, runs).checks[-1]
        assert check.name == "step time"
        assert check.state == state
        assert ("'none'" if plain_fits else "'recompute all'") in check.detail


def test_compiled_steps_are_compared_with_the_plans_promise():
    """Compiled without a C++ compiler."""
    torch._dynamo.reset()
    work = make_workload(Stack(dropout=0.0))
    measurer = Beside(work)
    compiler = Compiler("layers", "cpu", backend="aot_eager_decomp_partition")
    measurer.runner = StepRunner(work, get_device("cpu"), compiler=compiler)
    report = verified(promised(work, RECOMPUTE_ALL, compile="layers"), measurer, steps=2)
    assert checks(report)["gradients"] == "passed" and checks(report)["sentinels"] == "skipped"
    assert "compiled alike" in report.checks[0].detail
    torch._dynamo.reset()


def test_every_set_of_a_plan_is_held_against_plain_training():
    sets = [{"when": {"tokens": 64}, "choices": {"model.layers.0-2": "save"}}]
    plan = Plan.model_validate({"choices": {"model.layers.0-2": "recompute"}, "smaller_batches": sets})
    assert {"gradients", "gradients, 64 tokens"} <= {
        c.name for c in verify(plan, workload()).checks if c.state == "passed"
    }


def simulated(kind: str, budget: int | None = None, headroom: int = 0) -> Plan:
    device = DeviceInfo(kind=kind, name="a card", capacity_bytes=10_000)
    return Plan.create(
        {"layers.0": RECOMPUTE},
        [Unit(name="layers.0", cls="Layer", kind=0)],
        source="simulated",
        environment=Environment(device=device, versions={}),
        predicted=Prediction(peak_bytes=1000, step_seconds=0.1),
        budget=None if budget is None else ResolvedBudget(asked="1KB", bytes=budget, headroom_bytes=headroom),
    )


def measured(peak: int) -> Measurement:
    return Measurement(peak_bytes=peak, step_seconds=0.2, noise=0.01)


@pytest.mark.parametrize(
    ("planned", "here", "peak", "limits", "state"),
    [
        ("cuda", "cuda", 1040, (), "passed"),  # 5 % for an allocator that was modelled
        ("cuda", "cuda", 1060, (), "failed"),
        ("cpu", "cpu", 1005, (), "passed"),
        ("cpu", "cpu", 1040, (), "failed"),
        ("cuda", "cuda", 1040, (1030,), "failed"),
        ("cuda", "cuda", 1040, (1030, 10), "passed"),  # headroom is for what no simulation knew
        ("cuda", "cuda", 1040, (1030, 9), "failed"),
        ("cuda", "cpu", 5000, (1030,), "skipped"),  # another kind of device proves nothing
    ],
)
def test_a_simulated_peak_is_compared_and_named_as_such(
    planned: str, here: str, peak: int, limits: tuple[int, ...], state: str
) -> None:
    """``limits``: a budget, and what of it was left free as headroom."""
    check = judge_peak(simulated(planned, *limits), measured(peak), here)
    assert check.state == state
    assert "simulated" in check.detail and "a card" in check.detail and "promised" not in check.detail


def test_a_simulated_step_time_is_shown_and_fails_nothing() -> None:
    check = judge_time(simulated("cuda"), measured(1000), same_device=False)
    assert check.state == "skipped" and "simulated 100 ms for a card (+100.0 %)" in check.detail


def test_no_plan_is_said_to_keep_its_promise_whose_gradients_were_not_compared() -> None:
    states = {"gradients": "skipped", "sentinels": "passed", "peak": "passed", "step time": "passed"}
    report = VerifyReport(checks=tuple(Check(name=name, state=state, detail="") for name, state in states.items()))
    assert report.passed and "gradients were not compared" in report.verdict
