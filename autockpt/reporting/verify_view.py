"""``autockpt verify`` on screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autockpt.reporting.style import bullets, plain_table
from autockpt.schema import VerifyReport
from autockpt.schema.verification import MARKS

_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def print_report(report: VerifyReport, console: Console) -> None:
    """Print every check with what it compared, then the verdict."""
    table = plain_table("", "", "<", show_header=False)
    for check in report.checks:
        table.add_row(Text(MARKS[check.state], style=_COLOURS[check.state]), check.name, check.detail)
    console.print(table)
    if report.notes:
        console.print(bullets(report.notes))
    failed = any(check.state == "failed" for check in report.checks)
    style = "bold red" if failed else "bold green" if report.passed else "bold yellow"
    console.print(Text(report.verdict, style=style))
