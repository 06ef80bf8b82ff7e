from pathlib import Path

import pytest

from autockpt.analysis.verify import Check, VerifyReport
from autockpt.cli.verify import print_report
from autockpt.schema import Plan, WorkloadSpec
from tests.samples import UNITS, choices, printed


@pytest.fixture
def verified(replace) -> list[WorkloadSpec | None]:
    """Workloads that were verified; every second plan keeps its promise."""
    specs: list[WorkloadSpec | None] = []

    def verify(plan: Path, spec: WorkloadSpec | None, *, device: str | None, listener: object) -> VerifyReport:
        specs.append(spec)
        check = Check(name="peak", state="passed" if len(specs) % 2 else "failed", detail="d")
        return VerifyReport(checks=(check,))

    replace("autockpt.analysis.verify", verify=verify)
    return specs


def test_a_job_file_lies_over_the_plans_own_workload(autockpt, verified, tmp_path: Path) -> None:
    own = WorkloadSpec(model="llama-tiny", batch_size=4, accumulate=2, seed=7)
    Plan.create(choices(), UNITS, workload=own).save(tmp_path / "plan.yaml")
    result = autockpt("verify", "plan.yaml")
    assert result.code == 0 and "keeps its promise" in result.out
    (tmp_path / "job.yaml").write_text("batch_size: 2")
    result = autockpt("verify", "plan.yaml", "--job", "job.yaml", "--json")
    assert result.code == 4 and result.json["checks"][0]["state"] == "failed"
    assert verified == [None, own.model_copy(update={"batch_size": 2})]


def test_a_verification_on_screen() -> None:
    checks = (
        Check(name="gradients", state="passed", detail="bit-equal to plain training at 4 × 256"),
        Check(name="peak", state="failed", detail="470 MiB measured, 441 MiB promised"),
        Check(name="step time", state="skipped", detail="no promise"),
    )
    held = (checks[0], checks[1].model_copy(update={"state": "passed"}))
    for kept, verdict in (
        (checks, "does not keep"),
        (held, "keeps its promise"),
        (checks[:1], "no peak or step time was compared"),
        (checks[2:], "Nothing could"),
    ):
        text = printed(print_report, VerifyReport(checks=kept, notes=("a note",)))
        assert verdict in text and "a note" in text
    assert not VerifyReport(checks=checks).passed and VerifyReport(checks=checks[:1]).passed
