"""What the options of ``python -m tests.evidence.bench`` become."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autockpt.schema import DeviceInfo, Environment
from tests.evidence.bench.__main__ import build
from tests.evidence.bench.report import BenchReport, BenchRequest

run = CliRunner().invoke


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchRequest]:
    """Requests that arrive where the bench would begin."""
    import tests.evidence.bench

    seen: list[BenchRequest] = []

    def answer(request: BenchRequest, listener: Any = None) -> BenchReport:
        seen.append(request)
        environment = Environment(device=DeviceInfo(kind="cpu", name="x", capacity_bytes=1), versions={})
        return BenchReport(model="m", environment=environment, interrupted=request.rounds == 7)

    monkeypatch.setattr(tests.evidence.bench, "run_bench", answer)
    return seen


def test_options(asked: list[BenchRequest]) -> None:
    options = ["--budgets", "50%, 2GB", "--peers", "first-k, autockpt", "--choices", "save,offload", "--rounds", "70"]
    assert run(build(), ["-m", "llama-tiny", "--device", "cpu", *options]).exit_code == 0
    (request,) = asked
    assert [b.text for b in request.budgets] == ["50%", "2GB"] and request.peers == ("first-k", "autockpt")
    assert request.space.choices == ("save", "offload") and request.most_rounds == 70 and not request.notes


@pytest.mark.parametrize("budgets", ["30", "30%,30%", "x"])
def test_malformed_budgets_are_refused(asked: list[BenchRequest], budgets: str) -> None:
    result = run(build(), ["-m", "llama-tiny", "--device", "cpu", "--budgets", budgets])
    assert result.exit_code == 2 and "Traceback" not in result.output and not asked


@pytest.mark.campaign
def test_a_bench_of_real_steps_in_a_process_of_its_own(tmp_path: Path) -> None:
    step = ("--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--out", str(tmp_path))
    few = ("--peers", "recompute all,autockpt", "--choices", "save,recompute", "--rounds", "2", "--most-rounds", "2")
    command = [sys.executable, "-m", "tests.evidence.bench", *step, "--budgets", "90%", *few, "--trials", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=900)
    assert done.returncode == 0, done.stderr
    report = BenchReport.model_validate_json(done.stdout)
    assert {"recompute all", "autockpt"} <= {line.row.peer for line in report.lines if line.row.state == "measured"}
