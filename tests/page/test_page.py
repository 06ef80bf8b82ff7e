from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autockpt.errors import RunDirectoryError
from autockpt.hardware.roofline import environment_of_hardware
from autockpt.history.rundir import RunDirectory
from autockpt.page import write_page
from autockpt.page.contents import contents_of, without_paths
from autockpt.page.plans import GHOST, OPTUNA, SOLVER
from autockpt.page.render import _in_order, run_page
from autockpt.page.sentence import a_little_more, more_budget
from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, FinishedSearch, Prediction, WorkloadSpec
from autockpt.schema.batches import SizesTimed
from autockpt.schema.known import NUMBERED
from autockpt.schema.outlook import GhostAnswer, Outlook
from autockpt.schema.step_note import step_note
from search_spaces.hardware import load_hardware
from tests.page.samples import BUDGET, make_run, plan_of, trials, tried
from tests.reporting.samples import small_graph

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Read(HTMLParser):
    """Elements, text and data of a page; fails on what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = self.data = ""
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
        if self.open and self.open[-1] == "script" and data.startswith('{"run"'):
            self.data = data
        elif self.open and self.open[-1] not in ("script", "style"):
            self.text += f" {data}"

    @property
    def said(self) -> str:
        return " ".join(self.text.split())


def test_a_page_has_every_part_and_needs_nothing_else(tmp_path: Path) -> None:
    path = write_page(make_run(tmp_path))
    text = path.read_text()
    page = Read(text)
    assert path.name == "report.html" and len(text.encode()) < 2**20
    parts = ["answer", "budgets", "bytes", "layers", "search", "predictions", "changes", "record"]
    assert [i for i in page.ids if i in parts] == parts and len(page.ids) == len(set(page.ids))
    assert all(a.startswith("#") or a == "data:," for a in page.addresses), page.addresses
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    assert "Fits 1.86 KiB (60%act) with 50 B to spare, 11 % faster than recomputing everything" in page.said
    assert "14 % slower than saving everything (±" in page.said and "which does not fit (measured by real" in page.said
    assert "Of 3 plans with numbers 2 fit, and none of these is faster. The next leaner one, 150 B less" in page.said
    assert 'autockpt.apply(model, "' in page.said and "autockpt search --model" in page.said
    assert "The boxes, first to last: h.0-1." in page.said
    assert f"recompute: {RECOMPUTE.says}" in page.said and f"knobs #n: {NUMBERED['knobs']}" in page.said


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (["h.0", "x", "h.1", "h.2", "y"], "h.0, x, h.1-2, y"),
        (["v.0", "t.0", "v.1", "t.1"], "v.0, t.0, v.1, t.1"),
        (["h.1", "h.0"], "h.1, h.0"),
        (["v.0", "v.1", "v.2", "t.0", "t.1", "lm_head"], "v.0-2, t.0-1, lm_head"),
        (["stage.0.block.0", "stage.0.block.1", "stage.1.block.0"], "stage.0.block.0-1, stage.1.block.0"),
        (["*", "h.0-1"], "*, h.0-1"),
        ([], ""),
    ],
)
def test_boxes_are_named_in_their_order(units: list[str], said: str) -> None:
    assert _in_order(units) == said


def test_every_plan_has_a_letter_for_the_head_where_one_does_something_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.add_trial(tried(4, "with the head", plan_of(RECOMPUTE, SAVE) | {"lm_head": RECOMPUTE}, 1800, 0.15))
    letters = re.findall(r'class="letters">([^<]*)<', run_page(run))
    assert {"...", "RR.", "R.R"} <= set(letters) and {len(said) for said in letters if said} == {3}, letters


def test_it_says_how_fast_a_step_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    graph, plan = small_graph(), run.plan()
    assert plan is not None and plan.measured is not None
    for name in ("plain", "plan"):
        run.write_graph(graph, name)  # type: ignore[arg-type]
    plan.model_copy(update={"settings": {**plan.settings, "tokens": 64}}).save(
        run.path / "plan.yaml", existing="replace"
    )
    seconds = plan.measured.step_seconds
    assert seconds is not None and f"{64 / seconds:,.0f} tokens/s" in contents_of(run).rates


def test_other_budgets_are_answered_by_what_was_tried_and_by_what_is_predicted(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    run = contents_of(directory)
    plans = run.plans
    assert plans.best == "t2" and plans.front == ("t1", "t2", "t0")
    steps = {t.bytes: t for t in plans.thresholds}
    assert steps[1700].tried == "t1" and steps[1850].tried == "t2" and steps[2200].tried == "t0"
    assert {plans.points[k].phase for k in ("t2", "t3")} == {SOLVER, OPTUNA}
    assert plans.points["t2"].low == pytest.approx(0.16 * 0.98)
    assert all(p.basis == "predicted" for key, p in plans.points.items() if key.startswith("p"))
    assert any("more (2.15 KiB) would make a step 12.5 % faster (measured)" in s for s in run.more_budget)
    assert any(s.startswith("Another 200 B (2.05 KiB) would buy no time") for s in run.more_budget), run.more_budget
    assert plans.missed_bytes is not None and plans.missed_seconds is not None and plans.missed_seconds < 0.05

    ghost = GhostAnswer(choices=plan_of(OFFLOAD, SAVE), predicted=Prediction(peak_bytes=2000, step_seconds=0.15))
    directory.write_outlook(Outlook(plans=(ghost,), chunked_peak_bytes=1500))
    run = contents_of(directory)
    steps = {t.bytes: t for t in run.plans.thresholds}
    point = run.plans.points[steps[2000].predicted or ""]
    assert (point.basis, point.peak, point.seconds, dict(point.choices)) == (GHOST, 2000, 0.15, ghost.choices)
    assert "ghost run, time predicted" in run_page(directory)
    assert ("Head and loss in chunks", GHOST) in {(change.name, change.basis) for change in run.changes}


def test_a_micro_batch_of_an_update_is_asked_for_by_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, workload=WorkloadSpec(model="gpt2-tiny", batch_size=4), options=("--global-batch", "4"))
    run.write_sizes(SizesTimed(plans={2: "a", 4: "b"}, winner=2, times={2: (1.0,), 4: (2.0,)}))
    exactly = {change.name: change.options for change in contents_of(run).changes}
    assert exactly["Micro-batches of 2"] == "batch size 2, accumulate 2"


def test_what_is_left_free_is_said_wherever_a_budget_is(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    record = directory.finished()
    assert record is not None
    budget = record.outcome.budget.model_copy(update={"headroom": "5%", "headroom_bytes": 100})
    outcome = record.outcome.model_copy(update={"budget": budget})
    directory.write_finished(record.model_copy(update={"outcome": outcome}))
    run = contents_of(directory)
    assert "Fits 1.95 KiB (60%act) less 5% with 50 B to spare" in run.sentence
    assert any("(2.15 KiB besides the headroom)" in said for said in run.more_budget)


def test_no_more_memory_is_offered_than_the_device_has(tmp_path: Path) -> None:
    run = contents_of(make_run(tmp_path))
    assert run.budget is not None and run.budget.bytes == 1900
    another, nearest = more_budget(run.plans, run.budget, 2000)
    assert another.startswith("Another 100 B (1.95 KiB) would buy no time")
    assert nearest == "No larger budget of this device's memory is known to make a step faster."
    (said,) = more_budget(run.plans, run.budget, 1910)
    assert said.startswith("The budget is all that the device has")


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        (1, 1),
        (1900, 200),
        (290 * 10**6, 30 * 10**6),
        (8 * 10**9, 800 * 10**6),
        (24 * 10**9, 2 * 10**9),
        (10**11, 2 * 10**9),
    ],
)
def test_the_step_to_a_larger_budget_goes_by_the_budget(budget: int, more: int) -> None:
    assert a_little_more(budget) == more


def test_the_tape_says_what_is_alive_who_wrote_it_and_who_reads_it(tmp_path: Path) -> None:
    tape = contents_of(make_run(tmp_path)).tapes[0]
    assert tape.peak == max(tape.total) and min(tape.total) <= tape.average <= tape.peak
    assert tape.seconds == pytest.approx(12 * 0.01 + 0.02) or tape.seconds is not None
    for i, op in enumerate(tape.ops):
        alive = sum(s[0] for s in tape.storages if s[1] <= op <= s[2])
        assert tape.total[i] == tape.fixed[i] + tape.growing[i] + tape.small[i] + alive
    attention = next(s for s in tape.storages if s[0] == 100 and tape.units[s[3]] == "h.0")
    assert tape.words[attention[6]] == "attn · mm (forward)" and tape.words[attention[7]] == "mlp.up · mm (forward)"


def test_names_are_text_and_paths_stay_at_home(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    text = run_page(make_run(tmp_path, model=name))
    page = Read(text)
    assert "<script>alert" not in text and "<i>" not in text and name in page.text
    assert "somebody" not in text and str(tmp_path) not in text
    data = json.loads(page.data)
    assert data["plans"]["t2"]["name"] == f"#2 knobs {name}" and data["budget_bytes"] == BUDGET.bytes
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
    assert f"simulated, nothing was measured. {step_note(environment, None)}" in said and "autockpt verify" in said
    assert "Nothing was measured, so there is nothing to hold the predictions against." in said
    ghost = GhostAnswer(choices=plan_of(OFFLOAD, SAVE), predicted=Prediction(peak_bytes=1840, step_seconds=0.1759))
    run.write_outlook(Outlook(plans=(ghost,)))
    known = [t.tried for t in contents_of(run).plans.thresholds if t.bytes <= BUDGET.bytes]
    assert known[-1] == "t2", "what is hardly faster is not worth a mention beside the answer"


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
