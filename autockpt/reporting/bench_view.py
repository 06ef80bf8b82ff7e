"""``autockpt bench`` on screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autockpt.reporting import bench_words as say
from autockpt.reporting.style import bullets, heading, plain_table
from autockpt.schema import format_bytes, words
from autockpt.schema.bench import BenchReport


def print_bench(report: BenchReport, console: Console) -> None:
    """Print every row by group, then who is ahead at each budget, then how it was measured."""
    console.print(Text.assemble((f"{report.model} ", "bold"), f"on {report.environment.device.name}"))
    facts = words.facts({k: v for k, v in report.settings.items() if k not in ("model", "device")})
    console.print(Text(facts, style="dim"))
    if report.plain_peak_bytes is not None:
        console.print(Text(f"Saving everything peaks at {format_bytes(report.plain_peak_bytes)}"))
    for group, title in say.GROUPS.items():
        _print_group(report, group, title, console)
    lines = {line.row.key: line for line in report.lines}
    if report.budgets:
        console.print()
        console.print(bullets([say.verdict(result, lines) for result in report.budgets]))
    console.print()
    remarks = say.remarks(report)
    if report.interrupted:
        remarks.insert(0, "Interrupted: what was measured so far is kept, and the same command continues.")
    console.print(bullets(remarks))
    if report.directory is not None:
        console.print()
        console.print(Text(f"Written to {report.directory}: table.md, picture.svg, report.json"), soft_wrap=True)


def _print_group(report: BenchReport, group: str, title: str, console: Console) -> None:
    lines = [line for line in report.lines if line.row.group == group]
    if not lines:
        return
    table = plain_table(f"<{say.COLUMNS[0]}", *(f">{column}" for column in say.COLUMNS[1:]))
    for line in lines:
        style = "dim" if line.row.state != "measured" else "bold" if line.row.budget else None
        table.add_row(*say.cells(line, report.plain_peak_bytes), style=style)
    heading(title, console)
    console.print(table)
