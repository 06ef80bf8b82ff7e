"""``autockpt bench``: what its options become."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from autockpt.cli.app import build
from autockpt.schema import DeviceInfo, Environment
from autockpt.schema.bench import BenchReport, BenchRequest

run = CliRunner().invoke


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchRequest]:
    """Requests that arrive where the bench would begin."""
    import autockpt.bench

    seen: list[BenchRequest] = []

    def answer(request: BenchRequest, listener: Any = None) -> BenchReport:
        seen.append(request)
        environment = Environment(device=DeviceInfo(kind="cpu", name="x", capacity_bytes=1), versions={})
        return BenchReport(model="m", environment=environment, interrupted=request.rounds == 7)

    monkeypatch.setattr(autockpt.bench, "run_bench", answer)
    return seen


def test_defaults(asked: list[BenchRequest]) -> None:
    result = run(build(), ["bench", "--model", "llama-tiny", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    assert BenchReport.model_validate_json(result.stdout).model == "m"
    (request,) = asked
    assert [b.text for b in request.budgets] == ["30%", "45%", "60%", "85%"]
    assert request.peers is None and request.rounds == 9
    assert not any("offload" in c for c in request.space.choices) and "offload" in request.notes[0]


def test_options(asked: list[BenchRequest]) -> None:
    options = ["--budgets", "50%, 2GB", "--peers", "first-k, autockpt", "--choices", "save,offload", "--rounds", "70"]
    assert run(build(), ["bench", "-m", "llama-tiny", "--device", "cpu", *options]).exit_code == 0
    (request,) = asked
    assert [b.text for b in request.budgets] == ["50%", "2GB"] and request.peers == ("first-k", "autockpt")
    assert request.space.choices == ("save", "offload") and request.most_rounds == 70 and not request.notes


def test_an_interrupted_bench_exits_with_130(asked: list[BenchRequest]) -> None:
    assert run(build(), ["bench", "-m", "llama-tiny", "--device", "cpu", "--rounds", "7"]).exit_code == 130


@pytest.mark.parametrize("budgets", ["30", "30%,30%", "x"])
def test_malformed_budgets_are_refused(asked: list[BenchRequest], budgets: str) -> None:
    result = run(build(), ["bench", "-m", "llama-tiny", "--device", "cpu", "--budgets", budgets])
    assert result.exit_code == 2 and "Traceback" not in result.output and not asked
