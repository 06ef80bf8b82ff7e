"""From the contents of a run, or of two, to one HTML file without any other file or address in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autockpt.errors import RunDirectoryError
from autockpt.history.comparison import differences
from autockpt.history.rundir import RunDirectory
from autockpt.page import draw
from autockpt.page.contents import Contents, as_json, contents_of, without_paths
from autockpt.page.plans import PHASES, SAID, PlanPoint
from autockpt.reporting.answer import answer_rows, loading_lines
from autockpt.schema import SAVE, format_binary, words
from autockpt.schema.choices import legend
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.files import write_file
from autockpt.schema.known import OURS, legend_of_names
from autockpt.schema.names import fold, parse_pattern

PAGE = "report.html"
BEST_FEW = 5


def run_page(run: RunDirectory) -> str:
    """The page of a run. Raises RunDirectoryError or PlanError where a file of it is damaged."""
    contents = contents_of(run)
    return rendered("page.html.j2", as_json(contents), run=contents, **of_run(contents))


def write_page(run: RunDirectory, path: Path | None = None) -> Path:
    """Write the page to ``path`` (default: report.html in the run). Returns where it lies.

    Raises RunDirectoryError where the run is damaged or the file cannot be written.
    """
    return _written(path or run.path / PAGE, run_page(run), run)


def write_comparison(first: RunDirectory, second: RunDirectory, path: Path | None = None) -> Path:
    """Write the page about both to ``path`` (default: compare-<first>.html in the second). Returns where it lies.

    Raises RunDirectoryError or PlanError where a file of one is damaged, or the page cannot be written.
    """
    path = path or second.path / f"compare-{first.path.resolve().name}.html"
    return _written(path, compare_page(first, second), first, second)


def _written(path: Path, page: str, *runs: RunDirectory) -> Path:
    """Where the page lies. A run's own files are no links to others."""
    own = path.parent.resolve() in [run.path.resolve() for run in runs]
    named = " ".join(str(run.path) for run in runs)
    elsewhere = f"`autockpt report {named} --report-out FILE` writes it elsewhere; in Python report_out= does."
    return write_file(path, page, RunDirectoryError, elsewhere, links=not own)


def of_run(contents: Contents) -> dict[str, Any]:
    """What the template needs besides the contents themselves."""
    points = contents.plans.points.values()
    tried, others = [p for p in points if p.phase], {p.basis for p in points if not p.phase}
    fitting = sorted((p for p in tried if p.fits and p.seconds), key=lambda p: p.seconds or 0.0)
    budget_bytes = contents.budget.bytes if contents.budget is not None else 0
    return {
        "answers": answer_rows(contents.rows, budget_bytes) if contents.budget is not None else [],
        "load": loading_lines(contents.plan_file, contents.plan.compile if contents.plan else None),
        "tried": tried,
        "said": SAID,
        "allocator": contents.environment is not None and contents.environment.device.kind not in WITHOUT_STREAMS,
        "small": [(style, f"other budgets: {SAID[basis]}") for basis, style in draw.SMALL.items() if basis in others],
        "best_few": fitting[:BEST_FEW],
        "without": [p for p in tried if p.fits is False],
        "buys": _buys(contents),
        "phases": _phases(tried),
        "letters": words.letters(p.choices for p in points),
        "legend": legend(choice for p in points for choice in p.choices.values() if choice != SAVE),
        "names": legend_of_names([r.name for r in contents.rows] + [p.name.partition(" ")[2] for p in tried]),
        "units": _in_order(contents.units),
        "misses": _misses(tried),
    }


def _in_order(units: Sequence[str]) -> str:
    """``h.0-1, x, h.2``: folded no further than their order allows, so that boxes can be counted off."""
    run, runs = 0, {}
    for before, name in pairwise(["", *units]):
        both = list(fold({before: 0, name: 0}))
        run += len(both) > 1 or parse_pattern(both[0]).enumerate() != [before, name]
        runs[name] = run
    return ", ".join(fold(runs))


def _buys(contents: Contents) -> list[dict[str, Any]]:
    """What each threshold buys, leanest first; of a long list of predictions only some."""
    best = contents.answer
    budget_bytes = contents.budget.bytes if contents.budget is not None else 0
    rows = []
    for step in contents.plans.thresholds:
        point = contents.plans.points[step.predicted or step.tried or ""]
        if rows and rows[-1]["point"] is point:
            continue
        rows.append(
            {
                "bytes": step.bytes,
                "more": step.bytes - budget_bytes if budget_bytes else None,
                "point": point,
                "gain": 1 - point.seconds / best.seconds if best and best.seconds and point.seconds else None,
                "strip": words.strip(point.choices, 40, contents.units),
            }
        )
    nearest = next((row for row in rows if budget_bytes < row["bytes"]), None)
    return _spread(rows, 14, nearest)


def _spread(rows: list[dict[str, Any]], most: int, nearest: dict[str, Any] | None) -> list[dict[str, Any]]:
    """At most so many rows: the first, the last, and the ``nearest`` larger budget are among them.

    What is only predicted goes first, then ghost runs, and of them the row without which the others' step times are
    closest.
    """

    def order(i: int) -> tuple[bool, bool, float]:
        before, this, after = (row["point"] for row in rows[i - 1 : i + 2])
        return bool(this.phase) or rows[i] is nearest, this.sure, before.seconds - after.seconds

    while len(rows) > most:
        del rows[min(range(1, len(rows) - 1), key=order)]
    return rows


def _phases(tried: list[PlanPoint]) -> list[dict[str, Any]]:
    """Per phase of the search: trials, the best that fits, and by how much it lowered the best before it."""
    best: float | None = None
    rows = []
    for phase in PHASES:
        members = [p for p in tried if p.phase == phase]
        if not members:
            continue
        seconds = min((p.seconds for p in members if p.fits and p.seconds), default=None)
        gain = 1 - seconds / best if best and seconds and seconds < best else None
        rows.append({"phase": phase, "count": len(members), "best": seconds, "gain": gain, "first": best is None})
        best = min((s for s in (best, seconds) if s is not None), default=None)
    return rows


def _misses(tried: list[PlanPoint]) -> dict[str, float] | None:
    """The largest error of a prediction that was held against measured steps, in bytes and as a share of the time."""
    both = [p for p in tried if p.basis == "measured" and p.predicted_peak is not None and p.peak is not None]
    if not both:
        return None
    times = [abs(p.seconds / p.predicted_seconds - 1) for p in both if p.predicted_seconds and p.seconds]
    return {
        "bytes": max(abs((p.peak or 0) - (p.predicted_peak or 0)) for p in both),
        "share": max(times, default=0.0),
        "count": len(both),
    }


@cache
def _templates() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "bytes": format_binary,
        "seconds": words.seconds,
        "share": words.share,
        "signed": lambda value: words.share(value, signed=True),
    }
    environment.globals |= {"draw": draw, "words": words}
    return environment


def rendered(template: str, data: dict[str, Any], **named: Any) -> str:
    """A page from its template, with the data that its script works on."""
    folder = files("autockpt.page")
    loaded = _templates().from_string((folder / template).read_text(encoding="utf-8"))
    return loaded.render(
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        script=Markup((folder / "page.js").read_text(encoding="utf-8")),
        data=embedded(data),
        **named,
    )


def embedded(data: dict[str, Any]) -> Markup:
    """JSON that can stand in a script element: nothing in it ends the element or begins another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def compare_page(first: RunDirectory, second: RunDirectory) -> str:
    """One page about two runs. Raises RunDirectoryError or PlanError where a file of one is damaged."""
    both = contents_of(first), contents_of(second)
    return rendered(
        "compare.html.j2",
        {"plans": {}, "choices": [], "units": [], "thresholds": [], "tapes": []},
        first=both[0],
        second=both[1],
        verdict=_verdict(*both),
        asked=[tuple(map(without_paths, row)) for row in differences(first.question, second.question)],
        found=_found(*both),
        strips=[_strip(run) for run in both],
        tapes=[
            replace(run.tapes[-1], name=name)
            for run, name in zip(both, ("first run", "second run"), strict=True)
            if run.tapes and run.tapes[-1].name == OURS
        ],
    )


def _found(*runs: Contents) -> list[tuple[str, ...]]:
    """Rows of what came of each: a name, and a text for each run."""

    def of_answer(read: Any) -> list[str]:
        return [read(run.answer) if run.answer is not None else "—" for run in runs]

    rows: list[tuple[str, ...]] = [
        ("model", *(run.model for run in runs)),
        ("device", *(run.device for run in runs)),
        ("budget", *(format_binary(run.budget.bytes) if run.budget is not None else "—" for run in runs)),
        ("peak", *of_answer(lambda p: format_binary(p.peak) if p.peak is not None else "—")),
        ("step", *of_answer(_step)),
        ("known how", *of_answer(lambda p: p.basis or "—")),
        ("plans tried", *(str(sum(p.phase != "" for p in run.plans.points.values())) for run in runs)),
        ("ended", *(run.outcome.stopped if run.outcome is not None else run.state for run in runs)),
    ]
    versions = [dict(run.environment.versions) if run.environment is not None else {} for run in runs]
    for name in dict.fromkeys(k for told in versions for k in told):
        if len({told.get(name) for told in versions}) > 1:
            rows.append((name, *(told.get(name, "—") for told in versions)))
    return rows


def _step(point: PlanPoint) -> str:
    interval = f" ({words.seconds(point.low)} to {words.seconds(point.high)})" if point.low and point.high else ""
    return f"{words.seconds(point.seconds)}{interval}" if point.seconds else "—"


def _verdict(first: Contents, second: Contents) -> str:
    """The second run's plan against the first's, where they are of one model."""
    ours = [{row.name: row.measured or row.predicted for row in run.rows}.get(OURS) for run in (first, second)]
    if ours[0] is None or ours[1] is None:
        return "One of the two runs has no plan yet."
    jobs = [(run.model, run.settings.get("batch_size"), run.settings.get("seq_len")) for run in (first, second)]
    if jobs[0] != jobs[1]:
        said = " and ".join(f"{job[0]} at {' × '.join(str(n) for n in job[1:] if n is not None)}" for job in jobs)
        return f"These are two jobs, {said}: what they need and how long they take does not compare."
    more = ours[1].peak_bytes - ours[0].peak_bytes
    said = f"The second plan needs {format_binary(abs(more))} {'more' if more >= 0 else 'less'} and is "
    text = said + words.compared(ours[1], ours[0], "the first") + "."
    if first.source != second.source:
        text += " One was measured and the other simulated: their times are not of one kind."
    elif first.device != second.device:
        text += " They are of different devices."
    return text


def _strip(run: Contents) -> list[tuple[str, str, str]]:
    """Letter, kind and words of every unit of the answer."""
    choices = run.answer.choices if run.answer is not None else {}
    told = {unit: choices.get(unit, SAVE) for unit in run.units if choices}
    return [(choice.letter, choice.kind, f"{unit}: {choice}") for unit, choice in told.items()]
