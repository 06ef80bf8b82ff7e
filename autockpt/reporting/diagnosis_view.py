"""``autockpt diagnose`` on screen: what happened, what filled the device, and what helps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autockpt.reporting import area
from autockpt.reporting.answer import answer_rows, answer_table
from autockpt.reporting.style import bullets, heading, plain_table, remarks, simulated
from autockpt.schema import format_binary, words
from autockpt.schema.diagnosis import DeviceFailure, Diagnosis, Room

_BAR = 20
_FITS_ALREADY = (
    "By the simulation the job fits without a plan. Describe it as it ran (--batch-size, --seq-len, …), or take one "
    "of these by its peak:"
)


def print_diagnosis(said: Diagnosis, console: Console) -> None:
    """Print it all, a heading per question."""
    if said.verdict:
        console.print(Text(said.verdict, style="bold"))
    if said.model is not None:
        console.print(Text(", ".join(filter(None, (said.model, words.job(said.settings)))), style="dim"))
    if said.log.failures:
        _reported(said.log.failures[0], console)
    if said.agreement is not None and said.room is not None:
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
    known = {name: size for name, size in rows.items() if size is not None}
    if not known:
        return
    table = _sizes(known)
    if failure.capacity is not None:
        table.add_section()
        table.add_row("the device", format_binary(failure.capacity), style="bold")
    heading("What the message says", console, table)


def _sizes(rows: Mapping[str, int]) -> Table:
    table = plain_table("<", ">", show_header=False)
    for name, size in rows.items():
        table.add_row(name, format_binary(size))
    return table


def _simulated(said: Diagnosis, console: Console) -> None:
    assert said.agreement is not None
    marks = area.marks_of(console.encoding)
    total = max(1, sum(h.peak_bytes for h in said.holdings))
    table = plain_table("<", ">", ">", "", show_header=False)
    for h in said.holdings:
        if h.peak_bytes:
            share = h.peak_bytes / total
            table.add_row(h.name, format_binary(h.peak_bytes), words.share(share), area.bar(share, _BAR, marks))
    table.add_section()
    table.add_row("together", format_binary(total), "", "", style="bold")
    where = "where it runs over" if said.agreement.stage is not None else "at the peak"
    heading(f"What fills it, by a ghost run, {where}", console, table, bullets(said.agreement.verdicts))


def _prescription(said: Diagnosis, room: Room, console: Console) -> None:
    heading("Prescription", console, Text(_room(room)))
    if said.choices:
        if said.fits_already:
            console.print(Text(_FITS_ALREADY))
        console.print()
        console.print(answer_table(answer_rows(said.rows, room.for_plans.budget_bytes or 0), console))
        console.print(simulated(said.step_note))
        console.print()
        console.print(Text(f"Plan  {words.strip(said.choices)}   {words.tally(said.choices)}, simulated", style="bold"))
        _how_to(said, console)
        return
    smallest = f": the leanest needs {format_binary(said.smallest_peak)}" if said.smallest_peak is not None else ""
    console.print(Text(f"No plan alone fits{smallest}.", style="bold"))
    if not said.alternatives:
        console.print(Text("Nothing that was tried fits: take a smaller model, or a larger device."))
        return
    console.print(Text("What would, each ghost-run with one choice on all layers; simulated, not measured:"))
    console.print(_ways(said))


def _room(room: Room) -> str:
    others = f", {format_binary(room.others)} are held by others" if room.others else ""
    spare = room.budget - (room.for_plans.budget_bytes or 0)
    return (
        f"For {format_binary(room.budget)} of a device with {format_binary(room.capacity)}{others}; the context takes "
        f"{format_binary(room.overhead)} of it ({room.said}). A plan leaves {format_binary(spare)} free, as nothing "
        "was measured."
    )


def _how_to(said: Diagnosis, console: Console) -> None:
    if said.plan_path is not None:
        path = str(said.plan_path)
        lines = [
            f"autockpt.apply(model, {path!r})  # before training",
            f"autockpt search --resume {shlex.quote(path)} --budget auto  # on the device: measure it and do better",
        ]
    else:
        lines = ['--plan-out plan.yaml writes it; autockpt.apply(model, "plan.yaml") applies it']
    console.print()
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _ways(said: Diagnosis) -> Table:
    table = plain_table("<change", ">peak", ">step", ">per token", "<with", "<what changes")
    for way in said.alternatives:
        step = f"~{words.seconds(way.step_seconds)}" if way.step_seconds is not None else ""
        cost = f"~{way.relative_cost:.2f}×"
        table.add_row(way.options, format_binary(way.peak_bytes), step, cost, way.plan, way.effect)
    table.caption = "per token: simulated seconds over those of the leanest plan of the job as it was"
    return table
