from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from autockpt.analysis.page import contents_of, run_page, without_paths, write_page
from autockpt.cost.roofline import environment_of_hardware
from autockpt.errors import RunDirectoryError
from autockpt.schema import OFFLOAD, RECOMPUTE, FinishedSearch, Measurement, words
from autockpt.schema.known import NUMBERED
from autockpt.schema.outlook import Outlook
from autockpt.schema.remedy import Alternative
from autockpt.schema.runs import RunDirectory
from autockpt.schema.step_note import step_note
from autockpt.shipped import load_hardware
from tests.analysis.samples import make_run, plan_of, trials, tried

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Read(HTMLParser):
    """Elements, text and data of a page; fails on what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.open += [] if tag in VOID else [tag]
        self.ids += [given["id"] or ""] if "id" in given else []
        self.addresses += [given[name] or "" for name in ("src", "href", "action", "data") if name in given]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += f" {data}"

    @property
    def said(self) -> str:
        return " ".join(self.text.split())


def test_a_page_has_every_part_and_needs_nothing_else(tmp_path: Path) -> None:
    path = write_page(make_run(tmp_path))
    text = path.read_text()
    page = Read(text)
    assert path.name == "report.html" and len(text.encode()) < 2**20
    parts = ["answer", "budgets", "bytes", "layers", "search", "changes", "record"]
    assert [i for i in page.ids if i in parts] == parts and len(page.ids) == len(set(page.ids))
    assert all(a.startswith("#") or a == "data:," for a in page.addresses), page.addresses
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    assert "script" not in page.tags, "it works where scripts do not run"
    assert "Fits 1.86 KiB (60%act) with 50 B to spare, 11 % faster than recomputing everything" in page.said
    assert "14 % slower than saving everything (±" in page.said and "which does not fit (measured by real" in page.said
    assert 'autockpt.apply(model, "' in page.said and "autockpt search --model" in page.said
    assert f"recompute: {RECOMPUTE.says}" in page.said and f"knobs #n: {NUMBERED['knobs']}" in page.said
    assert "Of 3 plans that were measured, no peak was further than 3 B" in page.said
    assert "h.0: recompute" in page.said


def test_it_prints_the_explanation_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    said, page = contents_of(run)["said"], Read(run_page(run)).said
    assert said is not None and said.why is not None
    for text in ("The next faster plan needs", "Choices for h.0-1", said.holdings[0].name, said.curve.peak_target):
        assert text in page, text
    assert all(a.kind in page for a in said.moment.alive)


def test_a_choice_for_the_head_has_its_letter(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.add_trial(tried(4, "with the head", plan_of(RECOMPUTE, RECOMPUTE) | {"lm_head": RECOMPUTE}, 1800, 0.15))
    assert 'class="letters">RRR<' in run_page(run) and 'class="letters">R..<' in run_page(run)


def test_a_plan_within_the_noise_of_the_answer_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert not any("--again" in step for step in contents_of(run)["next_steps"])
    run.add_trial(tried(4, "rival", plan_of(OFFLOAD, RECOMPUTE), 1800, 0.161))
    assert any("#4 rival" in step and "--again" in step for step in contents_of(run)["next_steps"])


def test_plans_within_the_noise_are_about_as_fast() -> None:
    ours, other = (Measurement(peak_bytes=1, step_seconds=s, noise=0.1, steps=3) for s in (1.0, 1.1))
    assert words.compared(ours, other, "saving everything").startswith("about as fast as saving everything")
    exact = ours.model_copy(update={"noise": 0.01}), other.model_copy(update={"noise": 0.01})
    assert words.compared(*exact, "saving everything") == "9.1 % faster than saving everything (±1.4 %)"


def test_changes_of_the_job_are_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    way = Alternative(options="batch size 2, accumulate 2", effect="half the batch", plan="p", peak_bytes=1500,
                      step_seconds=None, relative_cost=1.1)  # fmt: skip
    run.write_outlook(Outlook(changes=(way,)))
    changes = {name: options for name, _, _, options in contents_of(run)["changes"]}
    assert changes == {way.effect: way.options}


def test_what_is_left_free_is_said_with_the_budget(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    record = directory.finished()
    assert record is not None
    budget = record.outcome.budget.model_copy(update={"headroom": "5%", "headroom_bytes": 100})
    outcome = record.outcome.model_copy(update={"budget": budget})
    directory.write_finished(record.model_copy(update={"outcome": outcome}))
    assert "Fits 1.95 KiB (60%act) less 5% with 50 B to spare" in contents_of(directory)["sentence"]


def test_names_are_text_and_paths_stay_at_home(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    text = run_page(make_run(tmp_path, model=name))
    page = Read(text)
    assert "<script>alert" not in text and "<i>" not in text and name in page.text
    assert "somebody" not in text and str(tmp_path) not in text
    assert (
        without_paths("see /a/b/c.py: it failed; --out=/x/y and/or ~/z/k")
        == "see …/c.py: it failed; --out=…/y and/or …/k"
    )


@pytest.mark.slow
def test_a_run_that_has_not_ended_says_so(tmp_path: Path) -> None:
    stopped = Read(run_page(make_run(tmp_path, answered=False)))
    assert "No end of the search is on record" in stopped.said and "#2 knobs" in stopped.said
    empty = RunDirectory.enter(tmp_path, {"model": "m"}, model="m", device="cpu", budget="auto")
    assert "Nothing was tried yet" in Read(run_page(empty)).said
    empty.write_outlook(Outlook(infeasible="nothing fits 1 <b>"))
    refused = Read(run_page(empty)).said
    assert "Nothing fits 1 <b>." in refused and "no step was timed" in refused
    busy = make_run(tmp_path, budget="70%act")
    with busy.lock():
        assert "still at work" in Read(run_page(busy)).said


def test_a_simulated_run_never_says_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for trial in trials():
        if trial.measured is not None:
            run.add_trial(trial.model_copy(update={"state": "simulated", "measured": None}))
    finished = run.finished()
    assert finished is not None
    rows = tuple(row.model_copy(update={"measured": None}) for row in finished.outcome.rows)
    outcome = finished.outcome.model_copy(update={"rows": rows, "source": "simulated"})
    run.write_finished(FinishedSearch(trials=2, outcome=outcome))
    environment = environment_of_hardware(load_hardware("h100"))
    run.write_environment(environment)
    said = Read(run_page(run)).said
    assert f"nothing was measured. {step_note(environment, None)}" in said and "autockpt verify" in said
    assert "Nothing was measured" in said


def test_a_damaged_run_and_an_unwritable_page_are_errors(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_page(run, run.path / "plan.yaml" / "page.html")
    (run.path / "profile.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="damaged"):
        run_page(run)


def test_a_page_in_the_run_is_written_through_no_link(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "theirs").write_text("kept")
    (run.path / "report.html").symlink_to(tmp_path / "theirs")
    for path in (None, run.path / "report.html"):
        with pytest.raises(RunDirectoryError, match="symbolic link"):
            write_page(run, path)
    assert (tmp_path / "theirs").read_text() == "kept"
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    write_page(run, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").read_text().startswith("<!doctype")
