"""Plans for compiled steps, verified in such steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt import Plan
from autockpt.analysis.verify import verify
from autockpt.devices import get_device
from autockpt.measuring import StepRunner
from autockpt.measuring.compiled import Compiler
from autockpt.schema import (
    SAVE,
    Choice,
    DeviceInfo,
    Environment,
    Measurement,
    ResolvedBudget,
    VerifyReport,
)
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


def test_compiled_steps_are_compared_with_the_plans_promise(tmp_path: Path) -> None:
    plan_of(small(), RECOMPUTE_ALL, compile="layers").save(tmp_path / "plan.yaml")
    work = small()
    report = verify(tmp_path / "plan.yaml", work, measurer=Here(work, "layers"), steps=2)
    assert states(report)["gradients"] == "passed" and states(report)["recomputed ops"] == "skipped"
    assert "compiled alike" in report.checks[0].detail
    assert states(report)["peak"] in ("passed", "failed") and report.measured is not None
