"""Two runs on one page: what was asked differently, and what came of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from autockpt.history.comparison import differences
from autockpt.history.rundir import RunDirectory
from autockpt.page.contents import Contents, contents_of, without_paths
from autockpt.page.render import rendered, write_text
from autockpt.page.sentence import compared
from autockpt.schema import SAVE, format_binary, words
from autockpt.schema.known import OURS


def write_comparison(first: RunDirectory, second: RunDirectory, path: Path | None = None) -> Path:
    """Write the page about both to ``path`` (default: compare-<first>.html in the second). Returns where it lies.

    Raises RunDirectoryError or PlanError where a file of one is damaged, or the page cannot be written.
    """
    return write_text(compare_page(first, second), path or second.path / f"compare-{first.path.resolve().name}.html")


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
    rows += [
        (name, *(told.get(name, "—") for told in versions))
        for name in dict.fromkeys(k for told in versions for k in told)
        if len({told.get(name) for told in versions}) > 1
    ]
    return rows


def _step(point: Any) -> str:
    interval = f" ({words.seconds(point.low)} to {words.seconds(point.high)})" if point.low is not None else ""
    return f"{words.seconds(point.seconds)}{interval}" if point.seconds else "—"


def _verdict(first: Contents, second: Contents) -> str:
    """The second run's plan against the first's, where they are of one model."""
    ours = [next((row for row in run.rows if row.name == OURS), None) for run in (first, second)]
    scores = [(row.measured or row.predicted) if row is not None else None for row in ours]
    if scores[0] is None or scores[1] is None:
        return "One of the two runs has no plan yet."
    more = scores[1].peak_bytes - scores[0].peak_bytes
    said = f"The second plan needs {format_binary(abs(more))} {'more' if more >= 0 else 'less'} and is "
    text = said + compared(scores[1], scores[0], "the first") + "."
    if first.source != second.source:
        text += " One was measured and the other simulated: their times are not of one kind."
    elif first.device != second.device:
        text += " They are of different devices."
    return text


def _strip(run: Contents) -> list[tuple[str, str, str]]:
    """Letter, kind and words of every unit of the answer."""
    choices = run.answer.choices if run.answer is not None else {}
    told = [(unit, choices.get(unit, SAVE)) for unit in run.units] if choices else []
    return [(choice.letter, choice.kind, f"{unit}: {choice}") for unit, choice in told]
