"""Plans in steps that are compiled otherwise than those they were made for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt import Plan, apply
from autockpt.devices import get_device
from autockpt.measuring import StepRunner
from autockpt.measuring.compiled import Compiler
from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    DeviceInfo,
    Environment,
    Measurement,
    ResolvedBudget,
    VerifyReport,
)
from autockpt.schema.choices import CompileBudget
from autockpt.verification import verify
from autockpt.workload import Step, discover_units
from tests.measuring.small_workloads import RECOMPUTE_ALL, Stack, make_workload

pytestmark = pytest.mark.slow

CHEAP = "aot_eager_decomp_partition"
HERE = Environment(device=DeviceInfo(kind="cpu", name="here", capacity_bytes=1), versions={})


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Here:
    """A measurer in this process, compiling without a C++ compiler."""

    def __init__(self, workload: Step, mode: Any = None, environment: Environment = HERE) -> None:
        compiler = Compiler(mode, "cpu", backend=CHEAP) if mode else None
        self.runner = StepRunner(workload, get_device("cpu"), compiler=compiler)
        self.environment, self.settings = environment, {"batch_size": 4}
        self.measure, self.compare, self.call = self.runner.measure, self.runner.compare, self.runner.call

    def close(self) -> None:
        self.runner.close()


def plan_of(workload: Step, choices: Mapping[str, Choice], **more: Any) -> Plan:
    units = [unit for unit in discover_units(workload.model) if unit.role == "block"]
    return Plan.create(
        {unit.name: choices.get(unit.name, SAVE) for unit in units},
        units,
        source="measured",
        environment=HERE,
        settings={"batch_size": 4},
        measured=Measurement(peak_bytes=100_000, step_seconds=0.5),
        budget=ResolvedBudget(asked="110000B", bytes=110_000),
        **more,
    )


def small() -> Step:
    return make_workload(Stack(dropout=0.0))


def states(report: VerifyReport) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


@pytest.mark.parametrize("mode", ["layers", "model"])
def test_an_eager_plan_in_compiled_steps_is_measured_noted_and_warned_of(mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan = plan_of(small(), {"layers.0": RECOMPUTE, "layers.1": RECOMPUTE})
    plan.save(path)
    work = small()
    report = verify(path, work, measurer=Here(work, mode), steps=2, compile=mode)
    assert states(report) == {
        "gradients": "passed",
        "recomputed ops": "skipped",
        "peak": "measured",
        "step time": "measured",
    }
    gradients, _, peak, seconds = report.checks
    assert report.passed and report.steps == mode and report.measured is not None
    assert "compiled alike" in gradients.detail and "not exact" not in gradients.detail
    assert "in eager steps, for which the plan was made, 97.7 KiB" in peak.detail and "everything alike" in peak.detail
    assert "500.0 ms" in seconds.detail and "times saving everything alike" in seconds.detail
    noted = Plan.load(path)
    assert noted.hash == plan.hash and noted.status == "measured" and noted.measured == plan.measured
    assert noted.otherwise[mode].peak_bytes == report.measured.peak_bytes
    model = Stack(dropout=0.0)
    with apply(model, path):
        for module in model.layers if mode == "layers" else [model]:
            module.compile(backend=CHEAP)
        words = rf"too: .*{noted.otherwise[mode].step_seconds:.3g} s a step instead of 97.7 KiB.*0.5 s"
        with pytest.warns(UserWarning, match=words):
            model(work.batch).sum().backward()


def test_a_compiled_plan_in_eager_steps(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan = plan_of(small(), dict.fromkeys(RECOMPUTE_ALL, CompileBudget(fraction=0.1)), compile="layers")
    plan.save(path)
    work = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the choice says that it does nothing eagerly
        report = verify(path, work, measurer=Here(work), steps=2, compile="eager")
    assert report.passed and states(report)["peak"] == "measured"
    assert set(Plan.load(path).otherwise) == {"eager"}


def test_the_plans_own_steps_are_held_against_its_promise(tmp_path: Path) -> None:
    plan_of(small(), RECOMPUTE_ALL, compile="layers").save(tmp_path / "plan.yaml")
    before = (tmp_path / "plan.yaml").read_text()
    work = small()
    report = verify(tmp_path / "plan.yaml", work, measurer=Here(work, "layers"), steps=2, compile="layers")
    assert report.steps is None and states(report)["peak"] in ("passed", "failed")
    assert (tmp_path / "plan.yaml").read_text() == before


def test_a_choice_that_no_graph_can_hold_is_measured_as_training_runs_it(tmp_path: Path) -> None:
    plan_of(small(), dict.fromkeys(RECOMPUTE_ALL, OFFLOAD)).save(tmp_path / "plan.yaml")
    work = small()
    report = verify(tmp_path / "plan.yaml", work, measurer=Here(work, "model"), steps=1, compile="model")
    assert report.passed and states(report)["peak"] == "measured"
    assert any("runs eagerly" in note for note in report.notes)


def test_a_plan_that_is_refused_there_has_failed(tmp_path: Path) -> None:
    budgets = {name: CompileBudget(fraction=0.1 + 0.1 * i) for i, name in enumerate(RECOMPUTE_ALL)}
    plan_of(small(), budgets, compile="layers").save(tmp_path / "plan.yaml")
    work = small()
    report = verify(tmp_path / "plan.yaml", work, measurer=Here(work, "model"), steps=1, compile="model")
    assert states(report)["gradients"] == states(report)["peak"] == "failed" and not report.passed
    assert "two layers of one graph" in report.checks[-2].detail
    assert not Plan.load(tmp_path / "plan.yaml").otherwise


@pytest.mark.parametrize(
    ("settings", "environment", "edit", "why"),
    [
        ({"batch_size": 2}, HERE, False, "batch size 4; here it is 2"),
        ({}, HERE.model_copy(update={"device": HERE.device.model_copy(update={"name": "there"})}), False, "name here"),
        ({}, HERE, True, "unmeasured"),
    ],
)
def test_what_cannot_be_set_against_the_promise_is_not_noted(
    settings: dict[str, Any], environment: Environment, edit: bool, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    plan_of(small(), {"layers.0": RECOMPUTE}).save(path)
    if edit:
        path.write_text(path.read_text().replace("layers.0: recompute", "layers.0: save"))
    before, work = path.read_text(), small()
    measurer = Here(work, "layers", environment)
    measurer.settings = settings
    report = verify(path, work, measurer=measurer, steps=1, compile="layers")
    assert report.passed and why in report.notes[-1] and path.read_text() == before
