from pathlib import Path

import pytest

from autockpt.cli.history import print_table
from autockpt.errors import RunDirectoryError
from autockpt.schema import RECOMPUTE
from autockpt.schema.plan import Plan
from autockpt.schema.run_directory import RunDirectory, plan_at
from autockpt.schema.trial import Outlook
from tests.analysis import samples
from tests.errors import raises
from tests.samples import printed, trial


def make_run(root: Path, budget: str = "60%") -> RunDirectory:
    run = RunDirectory.enter(root / budget, {"budget": budget})
    run.add_trial(trial(0, encoding="baseline", name="none", plan_hash="0", feasible=False, state="over_budget"))
    run.add_trial(trial(1))
    run.add_trial(trial(2, plan_hash="2", state="out_of_memory", feasible=False, measured=None))
    return run


def test_a_runs_trials_by_path_and_by_name(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path / "results")
    for name in (str(run.path), run.path.name):
        result = autockpt("history", name)
        assert result.code == 0 and "....ORRRRRRR" in result.out and "Pareto" in result.out, result.err
    data = autockpt("history", run.path.name, "--json").json
    assert [t["number"] for t in data["trials"]] == [0, 1, 2] and data["question"] == {"budget": "60%"}
    assert data["pareto_front"] == [0]


def test_what_was_not_judged_yet_is_not_said_to_fit(autockpt, tmp_path: Path) -> None:
    run = RunDirectory.enter(tmp_path / "run", {"budget": "60%act"})
    run.add_trial(trial(0, encoding="baseline", name="none", feasible=None))
    said = autockpt("history", str(run.path)).out
    assert "?" in said and "yes" not in said and "budget was not known in bytes" in said
    assert "budget was not known in bytes" in autockpt("history", str(run.path), "--trial", "0").out
    assert "none yet" in autockpt("history", str(tmp_path)).out
    assert autockpt("history", str(run.path), "--json").json["trials"][0]["feasible"] is None


def test_sets_by_length_are_shown_while_they_are_the_answer(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    whole = Plan(choices={"layers.0-3": "recompute"})
    run.write_plan(whole)
    smaller = {"when": {"tokens": 64}, "share": 0.75, "choices": {"layers.0-1": "recompute"}}
    run.write_plan(Plan.model_validate({**whole.model_dump(), "smaller_batches": [smaller]}))
    assert run.has_written(whole), "a search of the longest alone leaves the sets"
    said = autockpt("history", str(run.path))
    assert "up to 64 tokens, 75" in said.out and "all larger" in said.out, said.err
    assert len(autockpt("history", str(run.path), "--json").json["sets"]) == 2
    assert len(plan_at(run.path).sets) == 2
    run.write_plan(Plan(choices={"layers.0-2": "recompute"}))  # a later search of that length alone answered otherwise
    assert "up to 64" not in autockpt("history", str(run.path)).out
    with raises(RunDirectoryError, "command.txt"):
        plan_at(make_run(tmp_path, "40%").path)
    refused = make_run(tmp_path, "20%")
    refused.write_outlook(Outlook(infeasible="nothing fits 20%"))
    with raises(RunDirectoryError, "nothing fits 20%"):  # its own reason
        plan_at(refused.path)


def test_without_a_run_all_are_listed(autockpt, tmp_path: Path) -> None:
    make_run(tmp_path / "results")
    broken = make_run(tmp_path / "results", "40%")
    (broken.path / "trials.jsonl").write_text("x\n")
    refused = make_run(tmp_path / "results", "20%")
    refused.write_outlook(Outlook(infeasible="nothing fits 20%\nand why"))
    simulated = RunDirectory.enter(tmp_path / "results" / "8GB", {"budget": "8GB"})
    simulated.add_trial(trial(0, state="simulated", measured=None))
    result = autockpt("history")
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line}
    assert rows[make_run(tmp_path / "results").path.name][1:5] == ["448", "ms", "441", "MiB"]
    assert rows[simulated.path.name][1:5] == ["~451", "ms", "~441", "MiB"]
    assert rows[f"{broken.path.name}:"] and broken.path.name not in rows and "trials.jsonl:1" in result.out
    assert f"{refused.path.name}: nothing fits 20%\n" in result.out and result.code == 0
    listed = autockpt("history", "--json").json
    answers = [run["answer"]["measured"] for run in listed if run["answer"]]
    assert sorted(answer["step_seconds"] for answer in answers if answer) == [0.448] and None in answers
    assert sorted(run["infeasible"] for run in listed) == ["", "", "", "nothing fits 20%"]
    assert [bool(run["damaged"]) for run in listed].count(True) == 1
    assert autockpt("history", "--trial", "1").code == 2, "a trial is one of a run"


def test_names_cannot_drive_the_terminal(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path / "results")
    run.add_trial(trial(3, encoding="baseline", name="x\x1b]0;owned\x07\x1b[2Jy\x9b31mz", plan_hash="\x1b[31m3"))
    make_run(tmp_path / "results", "40%").path.rename(tmp_path / "results" / "a_b_c_\x1b[31md")
    for arguments in ((run.path.name,), ()):
        result = autockpt("history", *arguments)
        assert result.code == 0 and "\\x1b" in result.out
        assert not set(result.out) & {"\x1b", "\x9b", "\x07"}, result.out
    assert "\x1b" not in autockpt("history", run.path.name, "--json").out


def test_a_trial_in_full(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = trial(1)
    assert first.measured is not None
    again = first.measured.model_copy(update={"step_seconds": 0.5, "times": (0.4, 0.5, 0.6), "steps": 3})
    run.add_trial(first.model_copy(update={"measured": again, "message": "a word"}))
    out = autockpt("history", str(run.path), "--trial", "1").out
    assert "500 ms" in out and "a word" in out and "predicted" in out
    assert max(map(len, out.splitlines())) <= 100
    assert autockpt("history", str(run.path), "--trial", "1", "--json").json["measured"]["times"] == [0.4, 0.5, 0.6]
    missing = autockpt("history", str(run.path), "--trial", "7")
    assert (missing.code, missing.error) == (2, "run")


def test_a_trials_plan_is_a_plan(autockpt, tmp_path: Path) -> None:
    from autockpt.schema import Plan

    run, file = samples.make_run(tmp_path), tmp_path / "plan.yaml"
    result = autockpt("history", str(run.path), "--trial", "1", "--plan-out", str(file))
    assert result.code == 0 and str(file) in result.out, result.err
    plan = Plan.load(file)
    assert str(plan.choices["h.0-1"]) == "recompute" and plan.status == "measured"
    assert plan.measured is not None and plan.measured.peak_bytes == 1700 and "Trial 1 of" in plan.notes[0]
    own = autockpt("history", str(run.path), "--trial", "1", "--plan-out", str(run.path / "plan.yaml"))
    assert (own.code, own.error) == (2, "usage")
    failed = autockpt("history", str(run.path), "--trial", "3", "--plan-out", str(tmp_path / "failed.yaml"))
    assert failed.code == 0 and "Not the answer" in " ".join(Plan.load(tmp_path / "failed.yaml").notes)


def test_a_run_by_path_or_name_becomes_a_page(autockpt, tmp_path: Path) -> None:
    run = samples.make_run(tmp_path / "results")
    result = autockpt("history", run.path.name, "--page")
    assert result.code == 0 and result.out.strip() == str(run.path.relative_to(tmp_path) / "report.html"), result.err
    assert (run.path / "report.html").read_text().startswith("<!doctype html>")
    assert autockpt("history", str(run.path), "--page", "--json").json == {"page": str(run.path / "report.html")}


def test_a_folder_becomes_a_page_that_links_to_its_runs(autockpt, tmp_path: Path) -> None:
    run, named = samples.make_run(tmp_path / "runs" / "cards"), make_run(tmp_path / "runs" / "other", "20%")
    named.write_outlook(Outlook(infeasible="nothing fits <20%>"))
    assert autockpt("history", str(run.path), "--page").code == 0
    assert autockpt("history", "runs", "--page", "--json").json == {"page": "runs/index.html"}
    page = (tmp_path / "runs" / "index.html").read_text()
    assert f"cards/{run.path.name}/report.html" in page
    assert "nothing fits &lt;20%&gt;" in page and "<td>4×64</td>" in page
    assert page.count("<tr>") == 3 and "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("width", [80, 120])
def test_trials_and_their_front(width: int) -> None:
    trials = [
        trial(0, encoding="baseline", name="recompute all"),
        trial(1),
        trial(2, state="out_of_memory", feasible=False, measured=None),
        trial(4, feasible=False, state="over_budget"),
    ]
    text = printed(print_table, trials, [trials[1]], width=width)
    text += printed(print_table, [trial(5, choices={f"h.{i}": RECOMPUTE for i in range(100)})], [], width=width)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in text
    assert next(line for line in lines if line.startswith("*")).split()[1] == "1"
    assert "recompute all" in text and "OOM" in text and "R×100" in text
    assert "....ORRRRRRR" in text and trials[0].plan_hash[:8] in text and "Pareto" in text
