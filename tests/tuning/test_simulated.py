"""Searches for hardware that is not at hand: nothing is measured, and everything says so."""

from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.analysis.page import run_page
from autockpt.cost import simulated_memory
from autockpt.errors import InfeasibleError, PlanError
from autockpt.runtime import apply
from autockpt.schema import SAVE, Plan, SearchOutcome, SearchRequest, SearchSpace, WorkloadSpec, parse_budget
from autockpt.schema.choices import parse_choice
from autockpt.schema.hardware import Hardware
from autockpt.schema.run_directory import RunDirectory
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.cuda_memory import as_seen_by
from autockpt.tuning import run_search
from autockpt.tuning.targets import measured
from tests.errors import raises
from tests.measuring.sharded_models import Layer
from tests.policies.zoo import assert_equal
from tests.tuning.small import TWO_LAYERS, fewer_alternatives
from tests.unrepeated import gradients, one_block, unet

pytestmark = pytest.mark.slow

WORKLOAD = WorkloadSpec(model=TWO_LAYERS, batch_size=4, seq_len=64)
WEIGHTS = 4 * sum(p.numel() for p in Layer().parameters())


@pytest.fixture(autouse=True)
def no_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a simulated search measures nothing")

    monkeypatch.setattr(measured, "WorkerMeasurer", refuse)


@pytest.fixture(scope="module")
def card() -> Hardware:
    return load_hardware("rtx4090")


def ask(out: Path, hardware: Hardware, budget: str = "60%act", **more: Any) -> SearchRequest:
    space = SearchSpace().restricted(("recompute", "offload"))
    data = {"budget": parse_budget(budget), "workload": WORKLOAD, "space": space, "out": out}
    return SearchRequest.model_validate(data | {"hardware": hardware, "trials": 6} | more)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, card: Hardware) -> SearchOutcome:
    return run_search(ask(tmp_path_factory.mktemp("runs"), card))


def test_the_plan_says_what_it_is_and_claims_no_measurement(found: SearchOutcome, card: Hardware) -> None:
    assert found.plan is not None and found.plan_path is not None
    plan = Plan.load(found.plan_path)
    assert plan.source == plan.status == found.source == "simulated"
    assert plan.measured is None and all(row.measured is None for row in (*plan.baselines, *found.rows))
    assert plan.predicted is not None and plan.predicted.step_seconds
    assert plan.environment is not None and plan.environment.device.kind == "cuda"
    assert plan.environment.device.capacity_bytes == card.memory_bytes
    assert "torch" in plan.environment.versions
    assert "simulated" in str(plan.settings["device"])
    assert plan.predicted.peak_bytes <= found.budget.bytes < found.rows[0].predicted.peak_bytes  # type: ignore[union-attr]


def test_what_it_promises_is_what_a_ghost_run_of_the_plan_shows(found: SearchOutcome, card: Hardware) -> None:
    assert found.plan is not None and found.plan.predicted is not None
    with Tracer.from_spec(WORKLOAD, device=torch.device("cuda")) as tracer:
        graph = tracer.trace(found.plan.choices_for(tracer.units, tracer.head))
        assert found.plan.predicted.peak_bytes >= graph.peak_bytes + card.context_bytes
        assert found.run_directory is not None
        outlook = RunDirectory.open(found.run_directory).outlook()
        assert outlook is not None
        above = [run for run in outlook.plans if run.predicted.peak_bytes > found.budget.bytes]
        assert above, "larger budgets than the one that was asked for"
        ghost = min(above, key=lambda run: run.predicted.peak_bytes)
        peak = ghost.predicted.peak_bytes
        graph = as_seen_by(card, tracer.trace(ghost.choices), WORKLOAD)
        assert simulated_memory(card, peak)(graph) <= peak, "it fits the budget that is named for it"


def test_the_run_is_kept_like_a_measured_one(found: SearchOutcome, card: Hardware) -> None:
    assert found.run_directory is not None and card.name in found.run_directory.name
    run = RunDirectory.open(found.run_directory)
    trials = run.trials()
    assert trials and {t.state for t in trials} <= {"simulated", "predicted_over"}
    assert all(t.measured is None for t in trials)
    assert all("simulated" not in t.message for t in trials), "its figures say so already"
    assert run.environment() and run.graph() and run.profile() and run.question["hardware"]["name"] == card.name


def test_a_plan_to_start_from_adds_no_choice_to_those_allowed(found: SearchOutcome, card: Hardware) -> None:
    assert found.plan is not None
    for written, left_out in (("recompute", False), ("offload", True), ({"kind": "recompute", "tiles": 8}, True)):
        start = Plan(choices=dict.fromkeys(found.plan.choices, parse_choice(written)))
        asked = ask(Path(), card, start=start, space=SearchSpace().restricted(("recompute",)))
        plan = run_search(asked.model_copy(update={"out": None})).plan
        assert plan is not None and all(choice in (SAVE, parse_choice("recompute")) for choice in plan.choices.values())
        assert any("the plan to start from" in note for note in plan.notes) is left_out


def test_nothing_fits_names_alternatives_that_really_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_alternatives(monkeypatch)
    cpu = load_hardware("cpu")  # to the byte: a caching allocator hands out whole segments of 20 MiB
    small = cpu.model_copy(update={"memory_bytes": cpu.context_bytes + 3_500_000})
    spec = WORKLOAD.model_copy(update={"batch_size": 8})
    with pytest.raises(InfeasibleError) as caught:
        run_search(ask(tmp_path, small, budget="auto", workload=spec))
    assert caught.value.exit_code == 3 and caught.value.smallest_peak is not None
    assert caught.value.smallest_peak > small.memory_bytes
    changes = caught.value.alternatives
    assert 1 <= len(changes) <= 3 and all(change.peak_bytes <= small.memory_bytes for change in changes)
    assert all(change.spare_bytes == small.memory_bytes - change.peak_bytes for change in changes)
    assert all(change.options in caught.value.remedy for change in changes) and "simulated" in caught.value.remedy
    (run,) = map(RunDirectory.open, tmp_path.iterdir())
    outlook = run.outlook()
    assert outlook is not None and outlook.changes == changes and "nothing fits" in outlook.infeasible
    page = run_page(run)
    assert "Nothing fits" in page and all(escape(change.options) in page for change in changes)


def test_a_share_beyond_the_device_is_searched_within_it(tmp_path: Path) -> None:
    """The share is of this job's own peak, which the device need not hold."""
    cpu = load_hardware("cpu")
    whole = run_search(ask(tmp_path / "whole", cpu, budget="60%act"))
    small = cpu.model_copy(update={"memory_bytes": whole.budget.bytes})
    more = run_search(ask(tmp_path / "small", small, budget="90%act"))
    assert more.budget.bytes > small.memory_bytes and more.plan is not None and whole.plan is not None
    ours, theirs = more.plan.predicted, whole.plan.predicted
    assert ours is not None and theirs is not None and ours.peak_bytes <= small.memory_bytes
    assert ours.step_seconds == pytest.approx(theirs.step_seconds)


@pytest.mark.parametrize("room", [1.5, -5.0], ids=["two layers at most", "less than saving needs"])
def test_weights_stay_gathered_where_that_pays(room: float, tmp_path: Path) -> None:
    """``room``: beyond what saving everything needs, in layers' weights."""
    slow = load_hardware("cpu").model_copy(update={"peer_bandwidth": 1e8})
    spec = WorkloadSpec(model="tests.measuring.sharded_models:whole", shard=2)
    with Tracer.from_spec(spec, hardware=slow) as tracer:
        budget = slow.context_bytes + tracer.trace().peak_bytes + int(room * WEIGHTS)
    card = slow.model_copy(update={"memory_bytes": budget})
    asked = ask(tmp_path, card, "auto", workload=spec, space=SearchSpace().restricted(("recompute", "gathered")))
    found = run_search(asked)
    none_gathered = {"start": found.plan, "space": SearchSpace().restricted(("recompute",))}
    without = run_search(asked.model_copy(update={"out": None, **none_gathered}))
    assert found.plan is not None and without.plan is not None
    ours, theirs = found.plan.predicted, without.plan.predicted
    assert found.binding and without.binding == (room < 0)
    assert not any(choice.gathered for choice in without.plan.choices.values())
    assert any(choice.gathered for choice in found.plan.choices.values())
    assert ours is not None and theirs is not None and ours.peak_bytes <= budget
    assert ours.step_seconds < theirs.step_seconds  # type: ignore[operator]


def test_a_unet_is_cut_planned_and_trained_exactly(tmp_path: Path) -> None:
    more = {"workload": WorkloadSpec(model="tests.unrepeated:unet"), "plan_out": tmp_path / "plan.yaml"}
    space = SearchSpace().restricted(("save", "recompute", "recompute_offload"))
    outcome = run_search(ask(tmp_path, load_hardware("cpu"), "1.9MB", space=space, **more))
    plan = Plan.load(tmp_path / "plan.yaml")
    assert plan.settings["units"] == "down1,down2,mid,up2,up1"
    assert plan.workload is not None and plan.workload.units == plan.settings["units"]
    assert plan.predicted is not None and plan.predicted.peak_bytes <= 1_900_000
    assert any("Nothing repeats" in note for note in outcome.notes)
    step, saving = unet(), dict.fromkeys(plan.settings["units"].split(","), SAVE)
    assert any(choice != SAVE for choice in plan.expand_planned().values())
    assert_equal(gradients(step, plan), gradients(step, saving))
    with raises(PlanError):
        apply(one_block().model, plan)
