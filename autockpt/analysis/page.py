"""A run as one offline HTML page: what was found, why, and what other budgets would buy.

All of it comes from the run's files. Bytes, seconds and reasons are those of the run's Explanation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autockpt.analysis import draw
from autockpt.analysis.explain import explain_run
from autockpt.analysis.explanation import Curve, Explanation
from autockpt.analysis.holdings import StepBytes, curve
from autockpt.analysis.sentences import answer_rows, choice_words, loading_lines, place_words, reason_words, speed_words
from autockpt.errors import RunDirectoryError
from autockpt.interpreter import collection_paused
from autockpt.schema import SAVE, Comparison, Plan, Trial, format_binary, words
from autockpt.schema.baselines import OURS, legend_of_names
from autockpt.schema.choices import legend
from autockpt.schema.files import write_file
from autockpt.schema.names import outermost
from autockpt.schema.plan import choice_lines, promised, set_lines
from autockpt.schema.run_directory import RunDirectory
from autockpt.schema.words import step_note

PAGE = "report.html"
_NOT_WRITTEN = "Check permissions and free space there, or move away what is in its place."
# an absolute path, also behind a quote, an equals sign or a URL's scheme
_PATH = re.compile(r"(?<![\w.…/])(?:~|[A-Za-z]:)?[/\\]+(?:[^\s'\"/\\:,;()]+[/\\]+)+([^\s'\"/\\,;()]*)")
_STATES = {
    "empty": "Nothing was tried yet: the search has not come to its first trial.",
    "running": "The search is still at work; this is what it knows so far.",
    "stopped": "No end of the search is on record; this is what it knew by then.",
}


def write_page(run: RunDirectory) -> Path:
    """Write the page as report.html into the run's directory. Returns its path.

    Raises RunDirectoryError where the run is damaged or the file cannot be written.
    """
    return write_file(run.path / PAGE, run_page(run), RunDirectoryError, _NOT_WRITTEN)


def write_index(folder: Path, runs: Sequence[Any]) -> Path:
    """Write index.html into a folder: a sortable table of these runs, with links to their pages. Returns its path.

    Raises RunDirectoryError where it cannot be written.
    """
    rows = [(run, str((run.path / PAGE).relative_to(folder)) if (run.path / PAGE).exists() else "") for run in runs]
    page = templates().get_template("folder.html.j2").render(folder=folder.resolve().name, rows=rows)
    return write_file(folder / "index.html", page, RunDirectoryError, _NOT_WRITTEN)


def page_of(run: Path) -> str:
    """Write the page of a search that has ended, unless it is there. Returns a sentence about it.

    The search has its answer whatever is wrong with a page about it: an error becomes the sentence.
    """
    page, answer = run / PAGE, run / "outcome.json"
    try:
        if not page.exists() or not answer.exists() or page.stat().st_mtime < answer.stat().st_mtime:
            with collection_paused():
                write_page(RunDirectory.open(run))
        return f"The whole run on one page: {page}"
    except Exception as error:
        return f"The page about the run could not be written: {error}"


def run_page(run: RunDirectory) -> str:
    """The page of a run. Raises RunDirectoryError or PlanError where a file of it is damaged."""
    return templates().get_template("page.html.j2").render(contents_of(run))


def contents_of(run: RunDirectory) -> dict[str, Any]:
    """What the template draws. Files of the run that are missing leave their part out."""
    finished, plan, trials, refused = run.finished(), run.plan(), run.trials(), run.refusal()
    outcome = finished.outcome if finished is not None else None
    answer, asked_of = outcome or plan, plan or outcome
    budget = answer.budget if answer is not None else None
    rows, environment = outcome.rows if outcome is not None else (), run.environment()
    if outcome is None and plan is not None:
        known = {"predicted": plan.predicted, "measured": plan.measured, "plan_hash": plan.hash}
        rows = (*plan.baselines, Comparison(name=OURS, verdict="fits", **known))
    profile, outlook = run.profile(), run.outlook()
    explanation = explain_run(run.path, plan) if plan is not None else None
    source = "simulated" if any(t.state == "simulated" for t in trials) else "measured"
    state = _state(run, trials, outcome is not None, refused)
    settings = dict(asked_of.settings) if asked_of is not None else {}
    name = run.path.resolve().name
    place = Path(name) if run.path.is_absolute() else run.path
    plan_file = str(place / run.plan_path.name)
    device = environment.device.name if environment is not None else ""
    every = outermost(dict.fromkeys(u for t in trials for u in t.choices))
    drawn = _curves(run, profile.op_times.device.overhead_bytes if profile is not None else 0)
    reasons = reason_words(explanation) if explanation is not None and explanation.why is not None else []
    return {
        "run": name,
        "model": (plan.model.name if plan is not None else "") or run.model or "a model",
        "device": device + (" (simulated)" if source == "simulated" else ""),
        "source": source,
        "state": state,
        "sentence": sentence(plan, state, refused),
        "budget": budget,
        "rows": answer_rows(rows, budget.bytes) if budget is not None else [],
        "names": legend_of_names([r.name for r in rows] + [t.name for t in trials]),
        "plan": plan,
        "load": loading_lines(plan_file, plan.compile if plan is not None else None),
        "explanation": explanation,
        "why": [refused.partition("\n")[2]] if state == "infeasible" else reasons,
        "rates": speed_words(explanation) if explanation is not None else "",
        "curves": drawn,
        "points": list(_points(trials, plan, explanation if source == "simulated" else None)),
        "legend": legend(c for t in trials for c in t.choices.values() if c != SAVE),
        "units": list(every),
        "trials": trials,
        "misses": _misses(trials),
        "changes": outlook.changes if outlook is not None else (),
        "outcome": outcome,
        "settings": {k: v for k, v in settings.items() if v not in (None, "", False)},
        "environment": environment,
        "command": run.command(),
        "notes": answer.notes if answer is not None else (),
        "step_note": step_note(environment, plan.workload if plan is not None else None),
        "compiled": bool(run.question.get("compile")),
    }


def sentence(plan: Plan | None, state: str, refused: str = "") -> str:
    """The plan's peak and its step, with what is sure of them; or why there is none."""
    if state != "infeasible" and plan is None:
        return _STATES.get(state, "No plan was found.")
    text = promised(plan) if plan is not None and state != "infeasible" else refused.partition("\n")[0]
    return f"{text[:1].upper()}{text[1:]}." + (f" {_STATES[state]}" if state in ("running", "stopped") else "")


def _state(run: RunDirectory, trials: Sequence[Trial], finished: bool, refused: str) -> str:
    """finished, running, infeasible, stopped (no search has come to its end) or empty."""
    try:
        if (run.path / "lock").exists():
            with run.lock():
                pass
    except RunDirectoryError:
        return "running"
    return "infeasible" if refused else "empty" if not trials else "finished" if finished else "stopped"


def _points(trials: Sequence[Trial], plan: Plan | None, explanation: Explanation | None) -> Iterator[draw.PlotPoint]:
    """Trials with a peak and a step time, and of ``explanation`` the plans for other budgets."""
    for t in trials:
        if t.score is not None and t.score.step_seconds:
            title = f"#{t.number} {t.name}: {format_binary(t.score.peak_bytes)}, {words.step_of(t.score)}"
            style = "known" if t.encoding == "baseline" else "ours"
            size = 7 if plan is not None and t.plan_hash == plan.hash else 4.5
            where = t.score.peak_bytes, t.score.step_seconds
            yield draw.PlotPoint(*where, title, style, bool(t.feasible), t.score.noise, size)
    budgets = explanation.budgets if explanation is not None else ()
    for reach in (step.reach for step in budgets if step.reach is not None):
        title = f"for another budget: {format_binary(reach.peak_bytes)}, {words.seconds(reach.step_seconds)}"
        yield draw.PlotPoint(reach.peak_bytes, reach.step_seconds, title, "other", radius=3)


def _curves(run: RunDirectory, context_bytes: int) -> dict[str, Curve]:
    """Bytes through the step of saving everything, recomputing everything and the plan, as far as the run has them."""
    graphs = {"none": run.graph(), "all": run.graph("recompute"), "ours": run.graph("plan")}
    return {name: curve(StepBytes(g, None, context_bytes)) for name, g in graphs.items() if g is not None and g.ops}


def _misses(trials: Sequence[Trial]) -> str:
    """How far predictions were from measured steps, at most."""
    both = [(t.predicted, t.measured) for t in trials if t.predicted is not None and t.measured is not None]
    if not both:
        return ""
    peak = max(abs(real.peak_bytes - told.peak_bytes) for told, real in both)
    times = [abs(real.step_seconds / told.step_seconds - 1) for told, real in both if told.step_seconds]
    return (
        f"Of {len(both)} plans that were measured, no peak was further than {format_binary(peak)} from its prediction, "
        f"and no step time further than {words.share(max(times, default=0.0))}."
    )


def without_paths(text: str) -> str:
    """The text with absolute paths cut to their last part: where a run lies says whose machine it was."""
    return _PATH.sub(lambda match: f"…/{match[1]}" if match[1] else "…", text)


def _shown(value: Any) -> Any:
    return without_paths(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def templates() -> Environment:
    """What the templates of pages are rendered by: bytes and seconds as on the terminal, no absolute paths."""
    environment = Environment(
        loader=PackageLoader("autockpt.analysis", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"bytes": format_binary, "seconds": words.seconds, "share": words.share}
    environment.filters |= {"choice": choice_words, "place": place_words}
    environment.globals |= {"draw": draw, "words": words, "outermost": outermost}
    environment.globals |= {"choice_lines": choice_lines, "set_lines": set_lines}
    return environment
