"""``autockpt diagnose`` on screen: what happened, what filled the device, and what helps."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from autockpt.analysis.answer import answer_rows
from autockpt.analysis.diagnose import Diagnosis, Room
from autockpt.analysis.oom_log import DeviceFailure
from autockpt.cli.answer_table import answer_table
from autockpt.schema import format_binary, words
from autockpt.terminal import bar, bullets, heading, marks_of, plain_table, remarks, simulated


def print_diagnosis(said: Diagnosis, console: Console) -> None:
    """Print it all, a heading per question."""
    if said.verdict:
        console.print(Text(said.verdict, style="bold"))
    if said.model is not None:
        console.print(Text(", ".join(filter(None, (said.model, words.job(said.settings)))), style="dim"))
    if said.log.failure is not None:
        _reported(said.log.failure, console)
    if said.room is not None:
        _simulated(said, console)
        _prescription(said, said.room, console)
    if said.unprescribed:
        heading("No prescription", console, Text(said.unprescribed))
    if said.advice:
        heading("Besides" if said.room is not None else "What helps", console, bullets(said.advice))
    remarks(said.notes, console)


def _reported(failure: DeviceFailure, console: Console) -> None:
    rows = {
        "in tensors": failure.allocated,
        "reserved by PyTorch, unused": failure.cached,
        "context and the like": failure.overhead,
        "others on the device": failure.others,
        "free": failure.free,
    }
    table = plain_table("<", ">", show_header=False)
    for name, size in rows.items():
        if size is not None:
            table.add_row(name, format_binary(size))
    if not table.row_count:
        return
    if failure.capacity is not None:
        table.add_section()
        table.add_row("the device", format_binary(failure.capacity), style="bold")
    heading("What the message says", console, table)


def _simulated(said: Diagnosis, console: Console) -> None:
    marks = marks_of(console.encoding)
    total = max(1, sum(h.peak_bytes for h in said.holdings))
    table = plain_table("<", ">", ">", "", show_header=False)
    for h in said.holdings:
        if h.peak_bytes:
            share = h.peak_bytes / total
            table.add_row(h.name, format_binary(h.peak_bytes), words.share(share), bar(share, 20, marks))
    table.add_section()
    table.add_row("together", format_binary(total), "", "", style="bold")
    heading("What fills it at the peak, by a ghost run", console, table, bullets([said.agreement]))


_FITS_ALREADY = (
    "By the simulation the job fits without a plan. Describe it as it ran (--batch-size, --seq-len, …), or take one "
    "of these by its peak:"
)


def _prescription(said: Diagnosis, room: Room, console: Console) -> None:
    budget_bytes = room.for_plans.budget_bytes or 0
    others = f", {format_binary(room.others)} are held by others" if room.others else ""
    terms = (
        f"For {format_binary(room.budget)} of a device with {format_binary(room.capacity)}{others}; the context takes "
        f"{format_binary(room.overhead)} of it. A plan leaves {format_binary(room.budget - budget_bytes)} free, as "
        "nothing was measured."
    )
    heading("Prescription", console, Text(terms))
    if said.choices:
        if said.fits_already:
            console.print(Text(_FITS_ALREADY))
        plan = f"Plan  {words.strip(said.choices)}   {words.tally(said.choices)}, simulated"
        for part in (
            "",
            answer_table(answer_rows(said.rows, budget_bytes)),
            simulated(said.step_note),
            "",
            Text(plan, style="bold"),
            "",
        ):
            console.print(part)
        for line in _how_to(said):
            console.print(Text(f"  {line}"), soft_wrap=True)
        return
    smallest = f": the leanest needs {format_binary(said.smallest_peak)}" if said.smallest_peak is not None else ""
    console.print(Text(f"No plan alone fits{smallest}.", style="bold"))
    if not said.alternatives:
        console.print(Text("Nothing that was tried fits: take a smaller model, or a larger device."))
        return
    console.print(Text("What would, each ghost-run with one choice on all layers; simulated, not measured:"))
    table = plain_table("<change", ">peak", ">step", ">per token", "<with", "<what changes")
    for way in said.alternatives:
        step = f"~{words.seconds(way.step_seconds)}" if way.step_seconds is not None else ""
        cost = f"~{way.relative_cost:.2f}×"
        table.add_row(way.options, format_binary(way.peak_bytes), step, cost, way.plan, way.effect)
    table.caption = "per token: simulated seconds over those of the leanest plan of the job as it was"
    console.print(table)


def _how_to(said: Diagnosis) -> tuple[str, ...]:
    if said.plan_path is None:
        return ('--plan-out plan.yaml writes it; autockpt.apply(model, "plan.yaml") applies it',)
    path = str(said.plan_path)
    return (
        f"autockpt.apply(model, {path!r})  # before training",
        f"autockpt search --resume {shlex.quote(path)} --budget auto  # on the device: measure it and do better",
    )
