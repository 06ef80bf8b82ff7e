"""``autockpt diagnose``: from an out-of-memory failure to a plan, or to what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from autockpt.analysis.oom_log import read_log
from autockpt.cli.explain import holdings_table
from autockpt.cli.guard import guarded, progress, show
from autockpt.cli.options import arg, flag, opt, takes_workload
from autockpt.cli.search import print_answer
from autockpt.errors import InfeasibleError, UsageError
from autockpt.progress import listener
from autockpt.schema.workload import described_by
from autockpt.shipped import load_hardware
from autockpt.terminal import bullets, heading, remarks

if TYPE_CHECKING:
    from autockpt.analysis.diagnose import Diagnosis


@guarded
@takes_workload
def diagnose(
    workload: dict[str, Any],
    log: Path = arg("LOG", "The failed run's log: what it wrote to standard error.", ...),
    *,
    hardware: str | None = opt(
        "--hardware NAME",
        "The device: rtx4090, h100, …, or a YAML file. Default: the one whose memory is nearest to that in the log.",
    ),
    plan_out: Path | None = opt("--plan-out FILE", "Write the plan here; an earlier file is renamed."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Show what filled a device's memory, and find a plan that fits.

    Reads the log of the failed run; options or --job describe its training step. No step is run: bytes come from ghost
    runs (whole steps on tensors without memory), seconds from a roofline. Exits with 3 where no plan fits, after
    listing changes that would.
    """
    reading = read_log(log)
    spec = described_by(workload) if "model" in workload else None
    if spec is None and plan_out is not None:
        raise UsageError("--plan-out needs a model to plan for", remedy="Add --model, or --job with one.")
    card = None if hardware is None else load_hardware(hardware)
    from autockpt.analysis.diagnose import diagnose as diagnosed

    with listener(progress()) as watcher:
        diagnosis = diagnosed(reading, spec, hardware=card, plan_out=plan_out, listener=watcher)
    show(diagnosis, print_diagnosis, as_json)
    if diagnosis.no_plan:
        raise typer.Exit(UsageError.exit_code)
    if diagnosis.refusal:
        raise typer.Exit(InfeasibleError.exit_code)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print it all, a heading per question."""
    if diagnosis.verdict:
        console.print(Text(diagnosis.verdict, style="bold"))
    if diagnosis.holdings:
        table = holdings_table(diagnosis.holdings, 12)
        heading("What fills it at the peak, by a ghost run", console, table, bullets([diagnosis.agreement]))
        heading("Suggested plan", console, Text(diagnosis.terms))
    if diagnosis.outcome is not None:
        console.print()
        print_answer(diagnosis.outcome, console)
        if diagnosis.outcome.plan_path is None:
            console.print(Text("--plan-out plan.yaml writes the plan."))
    elif diagnosis.refusal:
        console.print(Text(diagnosis.refusal))
    if diagnosis.no_plan:
        heading("No plan is suggested", console, Text(diagnosis.no_plan))
    if diagnosis.advice:
        heading("Besides" if diagnosis.holdings else "What helps", console, bullets(diagnosis.advice))
    remarks(diagnosis.notes, console)
