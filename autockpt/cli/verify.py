"""``autockpt verify``: hold a plan against its promises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import FAILED, guarded
from autockpt.cli.options import DEVICE, arg, flag, opt, takes_workload, workload_spec

if TYPE_CHECKING:
    from rich.console import Console

    from autockpt.schema import VerifyReport


@guarded
@takes_workload
def verify(
    workload: dict[str, Any],
    plan: Path = arg("PLAN|RUN", "The plan file, or the directory of the run that found it.", default=...),
    *,
    device: str | None = DEVICE,
    seed: int | None = opt("--seed N", "For weights and batch. Default: 0.", min=0),
    as_json: bool = flag("--json", "Print the report as JSON."),
) -> None:
    """Check a plan's promises: gradients, peak and step time.

    In a fresh process: gradients equal to plain training's, ops recomputed as planned, peak and step time as promised.
    Options that are not given are those that the plan was made with. Exits with 4 where a promise is not kept.
    """
    from autockpt.schema.runs import plan_at

    spec = workload_spec(workload, base=plan_at(plan).workload, seed=seed)
    from autockpt.analysis.verify import verify as run_verification
    from autockpt.progress import listener

    with listener(screen.progress()) as watcher:
        report = run_verification(plan, spec, device=device, listener=watcher)
    screen.show(report, print_report, as_json)
    if not report.passed:
        raise typer.Exit(FAILED)


_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def print_report(report: VerifyReport, console: Console) -> None:
    """Print every check with what it compared, then the verdict."""
    from rich.text import Text

    from autockpt.schema.verification import MARKS
    from autockpt.terminal import bullets, plain_table

    table = plain_table("", "", "<", show_header=False)
    for check in report.checks:
        table.add_row(Text(MARKS[check.state], style=_COLOURS[check.state]), check.name, check.detail)
    console.print(table)
    if report.notes:
        console.print(bullets(report.notes))
    failed = any(check.state == "failed" for check in report.checks)
    style = "bold red" if failed else "bold green" if report.passed else "bold yellow"
    console.print(Text(report.verdict, style=style))
