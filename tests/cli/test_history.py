from __future__ import annotations

from pathlib import Path

from autockpt.history.rundir import RunDirectory
from tests.report.samples import trial


def make_run(root: Path, budget: str = "60%") -> RunDirectory:
    run = RunDirectory.enter(root, {"budget": budget}, model="llama-tiny", device="cpu", budget=budget)
    run.add_trial(trial(0, encoding="baseline", name="none", plan_hash="0", feasible=False, state="over_budget"))
    run.add_trial(trial(1))
    run.add_trial(trial(2, plan_hash="2", state="out_of_memory", feasible=False, measured=None))
    return run


def test_a_runs_trials_by_path_and_by_name(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path / "results")
    for name in (str(run.path), run.path.name):
        result = autockpt("history", name)
        assert result.code == 0 and "....ORRRRRRR" in result.out and "Pareto" in result.out, result.err


def test_json_and_the_best(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    data = autockpt("history", str(run.path), "--json").json
    assert [t["number"] for t in data["trials"]] == [0, 1, 2] and data["question"] == {"budget": "60%"}
    assert data["pareto_front"] == [0]
    assert [t["number"] for t in autockpt("history", str(run.path), "--json", "--best", "5").json["trials"]] == [1]
    ordered = autockpt("history", str(run.path), "--json", "--sort", "time").json["trials"]
    assert [t["number"] for t in ordered] == [1, 0, 2]


def test_without_a_run_all_are_listed(autockpt, tmp_path: Path) -> None:
    make_run(tmp_path / "results")
    broken = make_run(tmp_path / "results", "40%")
    (broken.path / "trials.jsonl").write_text("x\n")
    result = autockpt("history")
    assert result.code == 0 and "3 trials, 2 measured, best 448 ms" in result.out and "trials.jsonl:1" in result.out
    assert len(autockpt("history", "--json").json) == 2


def test_names_cannot_drive_the_terminal(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path / "results")
    run.add_trial(trial(3, encoding="baseline", name="x\x1b]0;owned\x07\x1b[2Jy\x9b31mz", plan_hash="\x1b[31m3"))
    (tmp_path / "results" / "a_b_c_\x1b[31md").mkdir()
    for arguments in ((run.path.name,), ()):
        result = autockpt("history", *arguments)
        assert result.code == 0 and "\\x1b" in result.out
        assert not set(result.out) & {"\x1b", "\x9b", "\x07"}, result.out
    assert "\x1b" not in autockpt("history", run.path.name, "--json").out


def test_what_is_no_run_is_a_usage_error(autockpt, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for arguments in ((), ("nothing",), (str(tmp_path),), (str(tmp_path), "--sort", "tim")):
        result = autockpt("history", *arguments)
        assert result.code == 2 and result.err.startswith("autockpt: ") and not result.out
