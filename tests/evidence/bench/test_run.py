"""A whole bench on a small workload in this process, and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autockpt.errors import InfeasibleError, UsageError
from autockpt.schema import WorkloadSpec, parse_budget
from autockpt.shipped import load_space
from tests.errors import raises
from tests.evidence.bench import run, run_bench
from tests.evidence.bench.report import BenchRequest, SearchCost
from tests.evidence.bench.stand_in import HereMeasurer
from tests.measuring.small_workloads import BLOCKS

pytestmark = pytest.mark.slow

PEERS = ("recompute all", "first-k", "offload all", "autockpt")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> HereMeasurer:
    """One stand-in for the worker, and a search that knows its answer."""
    made = HereMeasurer()
    monkeypatch.setattr(run, "WorkerMeasurer", lambda *_: made)

    def search(request: Any, budget: Any, *_: Any) -> tuple[dict[str, Any], SearchCost]:
        if budget.asked == "1%":
            raise InfeasibleError("nothing fits")
        return {f"layers.{i}": "recompute" for i in range(BLOCKS)}, SearchCost(trials=3, seconds=2, measured_seconds=1)

    monkeypatch.setattr(run, "search_for", search)
    return made


def request(tmp_path: Path, **more: Any) -> BenchRequest:
    fields: dict[str, Any] = {
        "workload": WorkloadSpec(model="small"),
        "budgets": tuple(map(parse_budget, ("1%", "99%"))),
        "space": load_space("knobs"),
        "peers": PEERS,
        "rounds": 2,
        "most_rounds": 3,
        "within": 1e-12,  # so that no ratio is known well enough, however quiet the machine
        "out": tmp_path,
        "command": ("autockpt", "bench"),
    }
    return BenchRequest(**fields | more)


def test_every_row_is_measured_in_turns_or_says_why_not(here: HereMeasurer, tmp_path: Path) -> None:
    report = run_bench(request(tmp_path))
    lines = {line.row.key: line for line in report.lines}
    assert list(lines) == [
        "save everything",
        "recompute all",
        *(f"first-k {k}" for k in range(1, BLOCKS)),
        "offload all",
        "autockpt 1%",
        "autockpt 99%",
    ]
    assert lines["offload all"].row.state == "missing" and "CPU" in lines["offload all"].row.message
    assert lines["autockpt 1%"].row.state == "infeasible" and lines["autockpt 1%"].row.message == "nothing fits"
    timed = [line for line in report.lines if line.row.state == "measured"]
    assert all(line.rounds >= 2 and line.row.gradients == "bit-equal" for line in timed)
    assert lines["autockpt 99%"].row.search == SearchCost(trials=3, seconds=2, measured_seconds=1)
    small, large = report.budgets
    assert small.ours is None and small.note == "no plan of ours fits; 0 others fit"
    assert large.ours == "autockpt 99%"
    assert "save everything" not in {d.rival for d in large.duels} and large.duels[0].ratio.rounds == 3
    assert not report.interrupted


def test_the_same_question_continues(here: HereMeasurer, tmp_path: Path) -> None:
    run_bench(request(tmp_path))
    before = here.calls.count("prepare"), here.calls.count("take_turns")
    report = run_bench(request(tmp_path, rounds=3))
    assert here.calls.count("prepare") == before[0], "measured rows are not made again"
    assert here.calls.count("take_turns") > before[1]
    assert all(line.rounds >= 3 for line in report.lines if line.row.state == "measured")
    assert len(list(tmp_path.iterdir())) == 1
    run_bench(request(tmp_path, fresh=True))
    assert len(list(tmp_path.iterdir())) == 2, "set aside, not thrown away"


@pytest.mark.parametrize("where", ["settings", "prepare", "take_turns"])
def test_an_interrupt_keeps_what_was_measured(here: HereMeasurer, tmp_path: Path, where: str) -> None:
    here.interrupt_at = where
    report = run_bench(request(tmp_path))
    assert report.interrupted and report.directory is not None
    assert "Interrupted" in (report.directory / "table.md").read_text()
    known = {line.row.key for line in report.lines if line.row.state == "measured"}
    here.interrupt_at = ""
    again = run_bench(request(tmp_path))
    assert not again.interrupted and known <= {line.row.key for line in again.lines}


def test_a_row_that_fails_in_a_round_ends_that_row_only(here: HereMeasurer, tmp_path: Path) -> None:
    call = here.call

    def failing(ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        if ref.endswith(":take_turns") and "first-k 1" in payload["rows"]:
            return {"seconds": {}, "failed": {"first-k 1": "it broke"}}
        return call(ref, payload)

    here.call = failing  # type: ignore[method-assign]
    lines = {line.row.key: line for line in run_bench(request(tmp_path)).lines}
    assert lines["first-k 1"].row.state == "failed" and lines["first-k 1"].row.message == "it broke"
    assert lines["first-k 2"].rounds >= 2


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"peers": ("frist-k",)}, "first-k"),
        ({"budgets": ()}, "--budgets"),
        ({"budgets": (parse_budget("auto"),)}, "auto"),
        ({"budgets": (parse_budget("50%act"),)}, "50%act"),
    ],
)
def test_questions_that_cannot_be_are_refused(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    with raises(UsageError, named):
        run_bench(request(tmp_path, **more))
    assert not list(tmp_path.iterdir())
