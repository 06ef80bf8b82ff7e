"""``autockpt diagnose``: from an out-of-memory failure to a plan, or to what would fit."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from autockpt.analysis.oom_log import read_log
from autockpt.analysis.sentences import answer_rows
from autockpt.cli.guard import guarded, progress, show
from autockpt.cli.options import arg, flag, opt, takes_workload, workload_spec
from autockpt.cli.search import answer_table
from autockpt.errors import InfeasibleError, UsageError
from autockpt.progress import listener
from autockpt.schema import format_binary, parse_budget, words
from autockpt.shipped import load_hardware
from autockpt.terminal import bar, bullets, heading, plain_table, remarks, simulated

if TYPE_CHECKING:
    from autockpt.analysis.diagnose import Diagnosis, Room

_FITS_ALREADY = (
    "By the simulation the job fits without a plan. Describe it as it ran (--batch-size, --seq-len, …), or take one "
    "of these by its peak:"
)


@guarded
@takes_workload
def diagnose(
    workload: dict[str, Any],
    log: Path = arg("LOG", "The failed run's log: what it wrote to standard error.", ...),
    *,
    budget: str | None = opt("--budget SIZE", "Plan for less than the device has: 22GiB. Default: all of it."),
    hardware: str | None = opt(
        "--hardware NAME",
        "The device: rtx4090, h100, …, or a YAML file. Default: the one nearest to what the log says.",
    ),
    plan_out: Path | None = opt("--plan-out FILE", "Write the plan here; another one there is set aside."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Show what filled a device's memory, and find a plan that fits.

    Reads the log of the failed run; options or --job describe its training step. No step is run: bytes come from ghost
    runs (whole steps on tensors without memory), seconds from a roofline. Exits with 3 where no plan fits, after
    listing changes that would.
    """
    asked = parse_budget(budget or "auto")
    if asked.is_share:
        raise UsageError(
            f"--budget {budget} is a share of a peak, and a failed run is planned for a device",
            remedy="Write a size with its unit, such as 22GiB, or leave it out.",
        )
    reading = read_log(log)
    spec = workload_spec(workload) if "model" in workload else None
    if spec is None and plan_out is not None:
        raise UsageError("--plan-out needs a model to plan for", remedy="Add --model, or --job with one.")
    card = None if hardware is None else load_hardware(hardware)
    from autockpt.analysis.diagnose import diagnose as diagnosed

    with listener(progress()) as watcher:
        said = diagnosed(reading, spec, budget=asked, hardware=card, plan_out=plan_out, listener=watcher)
    show(said, print_diagnosis, as_json)
    if said.unprescribed:
        raise typer.Exit(UsageError.exit_code)
    if said.room is not None and not said.choices:
        raise typer.Exit(InfeasibleError.exit_code)


def print_diagnosis(said: Diagnosis, console: Console) -> None:
    """Print it all, a heading per question."""
    if said.verdict:
        console.print(Text(said.verdict, style="bold"))
    if said.model is not None:
        console.print(Text(", ".join(filter(None, (said.model, words.job(said.settings)))), style="dim"))
    if said.room is not None:
        table = plain_table("<", ">", ">", "", show_header=False)
        total = max(1, sum(h.peak_bytes for h in said.holdings))
        for h in said.holdings:
            if h.peak_bytes:
                share = h.peak_bytes / total
                table.add_row(h.name, format_binary(h.peak_bytes), words.share(share), bar(share, 20))
        table.add_section()
        table.add_row("together", format_binary(total), "", "", style="bold")
        heading("What fills it at the peak, by a ghost run", console, table, bullets([said.agreement]))
        _prescription(said, said.room, console)
    if said.unprescribed:
        heading("No prescription", console, Text(said.unprescribed))
    if said.advice:
        heading("Besides" if said.room is not None else "What helps", console, bullets(said.advice))
    remarks(said.notes, console)


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
        console.print()
        console.print(answer_table(answer_rows(said.rows, budget_bytes)))
        console.print(simulated(said.step_note))
        plan = f"Plan  {words.strip(said.choices)}   {words.tally(said.choices)}, simulated"
        heading(plan, console)
        console.print()
        for line in _how_to(said.plan_path):
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


def _how_to(plan: Path | None) -> tuple[str, ...]:
    if plan is None:
        return ('--plan-out plan.yaml writes it; autockpt.apply(model, "plan.yaml") applies it',)
    return (
        f"autockpt.apply(model, {str(plan)!r})  # before training",
        f"autockpt search --resume {shlex.quote(str(plan))} --budget auto  # on the device: measure it and do better",
    )
