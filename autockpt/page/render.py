"""From the contents of a run to one HTML file without any other file or address in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autockpt.errors import RunDirectoryError
from autockpt.history.rundir import RunDirectory
from autockpt.page import draw
from autockpt.page.contents import Contents, as_json, contents_of
from autockpt.page.plans import PHASES, SAID, PlanPoint
from autockpt.reporting.answer import answer_rows, loading_lines
from autockpt.schema import SAVE, format_binary, words
from autockpt.schema.choices import legend
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.files import write_file
from autockpt.schema.known import legend_of_names
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
    path = path or run.path / PAGE
    own = path.parent.resolve() == run.path.resolve()  # a run's own files are no links to others
    elsewhere = f"`autockpt report {run.path} --report-out FILE` writes it elsewhere; in Python report_out= does."
    return write_file(path, run_page(run), RunDirectoryError, elsewhere, links=not own)


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
