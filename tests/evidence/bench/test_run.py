"""A whole bench on a small workload in this process, and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autockpt.errors import InfeasibleError, RunDirectoryError, UsageError
from autockpt.schema import WorkloadSpec, parse_budget
from autockpt.shipped import load_space
from tests.evidence.bench import run, run_bench
from tests.evidence.bench.peers import OUR_OWN
from tests.evidence.bench.peers import PEERS as PEERS_TABLE
from tests.evidence.bench.report import BenchReport, BenchRequest, BenchRow, SearchCost
from tests.evidence.bench.run import taking_part
from tests.evidence.bench.stand_in import HereMeasurer
from tests.evidence.bench.store import BenchDirectory
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


def test_compiled_plans_of_ours_are_searched_for_where_they_are_named(
    here: HereMeasurer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str | None] = []

    def search(request: Any, budget: Any, out: Any, listener: Any, compile: str | None = None) -> Any:
        modes.append(compile)
        raise InfeasibleError("not tried")

    monkeypatch.setattr(run, "search_for", search)
    monkeypatch.setattr(OUR_OWN["autockpt compiled layers"], "missing", lambda kind: "", raising=False)
    report = run_bench(request(tmp_path, peers=("autockpt", "autockpt compiled layers")))
    assert modes == [None, None, "layers", "layers"]
    assert {line.row.group for line in report.lines if line.row.peer == "autockpt compiled layers"} == {"compiled"}
    assert [result.peer for result in report.budgets] == ["autockpt", "autockpt compiled layers"] * 2


def test_compiled_plans_of_ours_take_part_only_where_they_are_named() -> None:
    assert {name for name in taking_part(None) if PEERS_TABLE[name].group == "compiled"} == {
        "torch.compile",
        "recompute all compiled",
    }
    assert taking_part(("autockpt compiled model",)) == ["save everything", "autockpt compiled model"]


def test_what_is_written_can_be_read(here: HereMeasurer, tmp_path: Path) -> None:
    report = run_bench(request(tmp_path))
    assert report.directory is not None
    read = BenchReport.model_validate_json((report.directory / "report.json").read_text())
    assert read == report.model_copy(update={"directory": None})
    assert "| recompute all |" in (report.directory / "table.md").read_text()
    assert (report.directory / "picture.svg").read_text().startswith("<svg")
    assert (report.directory / "command.txt").read_text() == "autockpt bench\n"


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


def test_peers_can_be_added_later(here: HereMeasurer, tmp_path: Path) -> None:
    few = run_bench(request(tmp_path, peers=("first-k",)))
    more = run_bench(request(tmp_path, peers=("first-k", "keep ops")))
    assert few.directory == more.directory
    assert {line.row.peer for line in more.lines} == {"save everything", "first-k", "keep ops"}
    assert all(line.rounds >= 2 for line in more.lines)


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


def test_a_peer_whose_settings_are_found_at_last_is_no_longer_a_row_that_failed(
    here: HereMeasurer, tmp_path: Path
) -> None:
    call = here.call

    def failing(ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        if ref.endswith(":settings") and payload["peer"] == "first-k":
            return {"failed": "no idea"}
        return call(ref, payload)

    here.call = failing  # type: ignore[method-assign]
    assert "first-k" in {line.row.key for line in run_bench(request(tmp_path)).lines}
    here.call = call  # type: ignore[method-assign]
    for _ in range(2):
        keys = {line.row.key for line in run_bench(request(tmp_path)).lines}
        assert "first-k" not in keys and {"first-k 1", "recompute all", "offload all"} <= keys


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"peers": ("frist-k",)}, "no peer 'frist-k'"),
        ({"budgets": ()}, "no budgets"),
        ({"budgets": (parse_budget("auto"),)}, "no budget 'auto'"),
        ({"budgets": (parse_budget("50%act"),)}, "no budget '50%act'"),
    ],
)
def test_questions_that_cannot_be_are_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_bench(request(tmp_path, **more))
    assert not list(tmp_path.iterdir())


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    directory = BenchDirectory.enter(tmp_path, {"a": 1}, model="m", device="cpu")
    with directory.lock():
        directory.add_row(BenchRow(key="a", peer="first-k", state="measured"))
        directory.add_round({"a": 1.0})
        with open(directory.path / "rounds.jsonl", "a") as file:
            file.write('{"a": 1')
        directory.add_round({"a": 2.0})
        assert directory.rounds() == [{"a": 1.0}, {"a": 2.0}]
        assert list(directory.rows()) == ["a"]
        assert json.loads((directory.path / "question.json").read_text()) == {"a": 1}
        with pytest.raises(RunDirectoryError, match="at work"):
            BenchDirectory.enter(tmp_path, {"a": 1}, model="m", device="cpu", fresh=True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("results/x/llama.json", "llama"),
        ("meta-llama/Llama-3.2-1B", "meta-llama-Llama-3.2-1B"),
        ("my.module:make", "my.module-make"),
    ],
)
def test_directories_are_named_for_the_model(tmp_path: Path, model: str, name: str) -> None:
    directory = BenchDirectory.enter(tmp_path, {"m": model}, model=model, device="cpu")
    assert directory.path.name.startswith(f"bench-{name}_cpu_")
