"""A plan for people's eyes: five lines for a terminal, a strip and a table for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from autockpt.errors import PlanError
from autockpt.schema import words
from autockpt.schema.choices import Choice
from autockpt.schema.known import ALL, NONE
from autockpt.schema.sizes import format_binary, format_bytes
from autockpt.schema.step_note import step_note

if TYPE_CHECKING:
    from autockpt.schema.plan import Comparison, Plan

COLOURS = {
    "save": "#d8dee6",
    "recompute": "#f0a830",
    "offload": "#6fc0ee",
    "selective": "#7fd1ae",
    "remake": "#d5abdc",
    "keep_attention": "#f0e050",
    "recompute_offload": "#9cb8f5",
    "segment": "#f4ab94",
}
OTHER = "#d2bc98"
TILE = "display:inline-block;min-width:1.5em;text-align:center;font:700 13px/1.7 monospace;color:#111;margin:1px"


def text(plan: Plan) -> str:
    """For what, what is done, peak, step time, and how to load it; a line more for each set of choices."""
    lines = [_made_for(plan), f"  {_done(plan)}", f"  peak {_peak(plan)}", f"  step {_step(plan)}"]
    lines += [f"  {line}" for line in set_lines(plan)]
    if plan.status == "simulated" and (note := step_note(plan.environment, plan.workload)):
        lines.append(f"  {note}")
    return "\n".join([*lines, f'  autockpt.apply(model, "{plan.file if plan.file != "PLAN" else "plan.yaml"}")'])


def applied(plan: Plan, choices: Mapping[str, Choice]) -> str:
    """One line for a training's log: which plan, how many units do what, its peak, its step against the usual plans.

    ``choices`` are those attached, by unit.
    """
    sets = f", and {words.counted(len(plan.smaller_batches), 'set')} of choices for smaller batches"
    done = f"{words.tally(choices)}{sets if plan.smaller_batches else ''}"
    named = f"plan {plan.hash}, {plan.status}" if plan.hash else "plan by hand"
    return "; ".join([f"{named}: {done}", f"peak {_peak(plan)}", *_gains(plan)])


def _gains(plan: Plan) -> list[str]:
    """The plan's step time against recomputing and saving everything, as far as both were measured, or predicted."""
    said, of = list[str](), "measured" if plan.measured is not None else "predicted"
    ours, rows = getattr(plan, of), {row.name: row for row in plan.baselines}
    for name, than in ((ALL, "recomputing every layer"), (NONE, "saving everything")):
        row = rows.get(name)
        if plan.status == "unmeasured" or ours is None or row is None or row.plan_hash == plan.hash:
            continue
        if row.verdict == "out_of_memory":
            said.append(f"{than} runs out of memory")
        elif (other := getattr(row, of)) is not None and ours.step_seconds and other.step_seconds:
            said.append(words.compared(ours, other, than) + (", predicted" if of == "predicted" else ""))
    return said


def set_lines(plan: Plan) -> list[str]:
    """A line for each set of choices of a plan that has several, the smallest batches first."""
    if not plan.smaller_batches:
        return []
    lines = []
    for each in plan.sets:
        bound = f"up to {each.when}" if each.when is not None else "all larger"
        bound += ", and larger" if each.when is not None and each.when == plan.when else ""
        share = f", {words.share(each.share)} of batches" if each.share is not None else ""
        lines.append(f"{bound}{share}: {_done(each)}; peak {_peak(each)}; step {_step(each)}")
    return lines


def choice_lines(choices: Mapping[str, Choice]) -> list[str]:
    """A line for each choice, with the patterns that it is made for: ``model.layers.0-3, 7: offload``."""
    by_choice: dict[Choice, list[str]] = {}
    for pattern, choice in choices.items():
        by_choice.setdefault(choice, []).append(pattern)
    return [f"{_listed(patterns)}: {choice}" for choice, patterns in by_choice.items()]


def _listed(patterns: Sequence[str]) -> str:
    """Patterns in a row, each without what it has in common with the one before it: all but the last component."""
    said, before = "", None
    for pattern in patterns:
        outer, _, last = pattern.rpartition(".")
        said += f", {last if outer == before else pattern}"
        before = outer
    return said.removeprefix(", ")


def html(plan: Plan) -> str:
    """A fragment of a page without scripts or links: the strip of units, and the plan next to the well-known ones."""
    tiles = "".join(
        f'<span style="{TILE};background:{COLOURS.get(choice.kind, OTHER)}" title="{escape(f"{name}: {choice}")}">'
        f"{escape(choice.letter)}</span>"
        for name, choice in _choices(plan).items()
    )
    rows = "".join(_row(row, plan) for row in plan.baselines)
    head = "<tr><th>plan</th><th>fits</th><th>peak</th><th>step</th></tr>"
    said = "<br>".join(escape(line.strip()) for line in text(plan).splitlines()[1:-1])
    return f"<p><b>{escape(_made_for(plan))}</b><br>{said}</p><div>{tiles}</div>" + (
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""
    )


def _choices(plan: Plan) -> dict[str, Choice]:
    """By unit where the plan lists its units, else by the patterns that it is written in."""
    try:
        return plan.expand_planned()
    except PlanError:
        return dict(plan.choices)


def _made_for(plan: Plan) -> str:
    where = plan.environment.device.name if plan.environment is not None else ""
    budget = f", budget {plan.budget.words} = {format_bytes(plan.budget.bytes)}" if plan.budget is not None else ""
    on = {"measured": f" on {where}", "simulated": f" for {where}"}.get(plan.status, "") if where else ""
    return f"Plan {plan.hash or 'by hand'} for {plan.model.name or 'any model'}: {plan.status}{on}{budget}"


def _done(plan: Plan) -> str:
    choices = _choices(plan)
    return f"{words.strip(choices)}   {words.tally(choices)}" if choices else "nothing: every unit saves"


def _peak(plan: Plan) -> str:
    reading = (plan.measured or plan.predicted) if plan.status != "unmeasured" else None
    if reading is None:
        return f"unknown: {plan.status_reason}"
    how, peak = "measured" if plan.measured is not None else "simulated, not measured", reading.peak_bytes
    left = "" if plan.budget is None else f", {format_binary(plan.budget.bytes - peak)} of the budget free"
    return f"{format_binary(peak)} {how}{left}"


def _step(plan: Plan) -> str:
    score, of = (plan.measured, "measured") if plan.measured is not None else (plan.predicted, "predicted")
    if plan.status == "unmeasured" or score is None or not score.step_seconds:
        return "time unknown"
    rows, said = {row.name: row for row in plan.baselines}, [words.step_of(score)]
    for name, than in (("none", "saving everything"), ("recompute all", "recomputing everything")):
        reading = getattr(rows[name], of) if name in rows else None
        if reading is not None and reading.step_seconds:
            said.append(words.compared(score, reading, than))
    return ", ".join(said)


def _row(row: Comparison, plan: Plan) -> str:
    reading = row.measured or row.predicted
    peak, step = format_binary(reading.peak_bytes) if reading is not None else "—", words.step_of(reading)
    fits = {"fits": "yes", "over_budget": "no", "out_of_memory": "out of memory"}.get(row.verdict, "not measured")
    if row.measured is None and reading is not None and plan.budget is not None:
        fits = "yes, simulated" if reading.peak_bytes <= plan.budget.bytes else "no, simulated"
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (row.name, fits, peak, step)) + "</tr>"
