from html.parser import HTMLParser
from pathlib import Path

import pytest

from autockpt.analysis.page import contents_of, run_page, without_paths, write_page
from autockpt.schema import RECOMPUTE, Measurement
from autockpt.schema.baselines import MEANINGS
from autockpt.schema.run_directory import RunDirectory
from autockpt.schema.trial import Alternative, Outlook
from tests.analysis.samples import make_run

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
    assert "50 B of the budget free" in page.said and "11 % faster than recomputing everything" in page.said
    assert 'autockpt.apply(model, "' in page.said and "autockpt search --model" in page.said
    assert f"recompute: {RECOMPUTE.says()}" in page.said and f"knobs #n: {MEANINGS['knobs']}" in page.said
    assert "Of 3 plans that were measured, no peak was further than 3 B" in page.said
    assert "h.0: recompute" in page.said


def test_predictions_are_marked_and_unknown_noise_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    finished = run.finished()
    assert finished is not None
    none, everything, ours = finished.outcome.rows
    unsure = everything.model_copy(update={"measured": Measurement(peak_bytes=1700, step_seconds=0.18, noise=1.0)})
    guessed = everything.model_copy(update={"name": "every-2", "measured": None, "verdict": "not_measured"})
    outcome = finished.outcome.model_copy(update={"rows": (none, unsure, guessed, ours)})
    run.write_finished(finished.model_copy(update={"outcome": outcome}))
    said = Read(run_page(run)).said
    assert "±100" not in said and "every-2 yes ~1.66 KiB" in said and "~ simulated, not measured" in said


def test_it_prints_the_explanation_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    said, page = contents_of(run)["explanation"], Read(run_page(run)).said
    assert said is not None and said.why is not None
    for text in ("The next faster plan needs", "Choices for h.0-1", said.holdings[0].name, said.curve.peak_target):
        assert text in page, text
    assert all(a.op in page for a in said.moment.alive)


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
    empty = RunDirectory.enter(tmp_path / "run", {"model": "m"})
    assert "Nothing was tried yet" in Read(run_page(empty)).said
    way = Alternative(options="batch size 2, accumulate 2", effect="half the batch", plan="p", peak_bytes=1500,
                      step_seconds=None, relative_cost=1.1)  # fmt: skip
    empty.write_outlook(Outlook(infeasible="nothing fits 1 <b>", changes=(way,)))
    refused = Read(run_page(empty)).said
    assert "Nothing fits 1 <b>." in refused and "no step was timed" in refused
    assert "Half the batch peak 1.46 KiB with p, 1.10 times the seconds per token" in refused
    busy = make_run(tmp_path, budget="70%act")
    with busy.lock():
        assert "still at work" in Read(run_page(busy)).said
