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
    steps = f"steps that are compiled otherwise than the plan's ({report.steps})"
    if failed:
        said = "does not keep its promise" if report.steps is None else f"cannot be used in {steps}"
        said, style = f"The plan {said}: {', '.join(failed)}.", "bold red"
    elif report.steps is not None:
        said, style = f"This is what {steps} take; it promises nothing about them.", "bold"
    elif any(c.state == "passed" for c in report.checks if c.name in ("peak", "step time")):
        said, style = "The plan keeps its promise.", "bold green"
    elif report.passed:
        said, style = "No check failed; no peak or step time was compared with the plan's.", "bold green"
    else:
        said, style = "Nothing could be checked.", "bold yellow"
    console.print(Text(said, style=style))
