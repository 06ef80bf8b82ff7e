"""``autockpt verify``: check a plan against real training steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from autockpt.cli.guard import FAILED, guarded, progress, show
from autockpt.cli.options import DEVICE, arg, flag, job_file, opt
from autockpt.progress import listener
from autockpt.schema.run_directory import plan_at
from autockpt.schema.workload import described_by
from autockpt.terminal import bullets, plain_table

if TYPE_CHECKING:
    from autockpt.analysis.verify import VerifyReport


@guarded
def verify(
    plan: Path = arg("PLAN|RUN", "The plan file, or the directory of the run that found it.", default=...),
    *,
    job: Path | None = opt(
        "--job FILE",
        "The training step as YAML (docs/job.md lists the keys). Keys override the step stored in the plan.",
        show_default=False,
    ),
    device: str | None = DEVICE,
    as_json: bool = flag("--json", "Print the report as JSON."),
) -> None:
    """Check a plan against real steps: gradients, peak and step time.

    Runs in a new process. Gradients must equal those of plain training, recomputed and offloaded tensors must match the
    forward pass, and peak and step time must be as promised. The training step is the one that the plan was made for; a
    job file changes it, or describes it where the plan does not. Exits with 4 where a promise is not kept.
    """
    spec = None if job is None else described_by(job_file(job), plan_at(plan).workload)
    from autockpt.analysis.verify import verify as run_verification

    with listener(progress()) as watcher:
        report = run_verification(plan, spec, device=device, listener=watcher)
    show(report, print_report, as_json)
    if not report.passed:
        raise typer.Exit(FAILED)


_MARKS = {"passed": ("ok", "green"), "failed": ("FAILED", "bold red"), "skipped": ("skipped", "yellow")}


def print_report(report: VerifyReport, console: Console) -> None:
    """Print every check with what it compared, then the verdict."""
    table = plain_table("", "", "<", show_header=False)
    for check in report.checks:
        table.add_row(Text(*_MARKS[check.state]), check.name, check.detail)
    console.print(table)
    if report.notes:
        console.print(bullets(report.notes))
    failed = any(check.state == "failed" for check in report.checks)
    style = "bold red" if failed else "bold green" if report.passed else "bold yellow"
    console.print(Text(report.verdict, style=style))
