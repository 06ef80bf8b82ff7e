"""``autockpt verify`` on screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autockpt.reporting.style import bullets, plain_table
from autockpt.schema import VerifyReport

_MARKS = {
    "passed": ("ok", "green"),
    "failed": ("FAILED", "bold red"),
    "skipped": ("skipped", "yellow"),
    "measured": ("measured", "cyan"),
}


def print_report(report: VerifyReport, console: Console) -> None:
    """Print every check with what it compared, then the verdict."""
    table = plain_table("", "", "<", show_header=False)
    for check in report.checks:
        mark, colour = _MARKS[check.state]
        table.add_row(Text(mark, style=colour), check.name, check.detail)
    console.print(table)
    if report.notes:
        console.print(bullets(report.notes))
    failed = [c.name for c in report.checks if c.state == "failed"]
    if report.steps is not None:
        steps = f"steps that are compiled otherwise than the plan's ({report.steps})"
        if failed:
            console.print(Text(f"The plan cannot be used in {steps}: {', '.join(failed)}.", style="bold red"))
        else:
            console.print(Text(f"This is what {steps} take; it promises nothing about them.", style="bold"))
    elif failed:
        console.print(Text(f"The plan does not keep its promise: {', '.join(failed)}.", style="bold red"))
    elif report.passed and any(c.state == "passed" for c in report.checks if c.name in ("peak", "step time")):
        console.print(Text("The plan keeps its promise.", style="bold green"))
    elif report.passed:
        console.print(Text("No check failed; no peak or step time was compared with the plan's.", style="bold green"))
    else:
        console.print(Text("Nothing could be checked.", style="bold yellow"))
