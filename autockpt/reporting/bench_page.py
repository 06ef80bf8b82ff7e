"""``autockpt bench`` as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence

from autockpt.reporting import bench_words as say
from autockpt.schema import format_bytes, words
from autockpt.schema.bench import BenchReport


def bench_page(report: BenchReport) -> str:
    """The whole page: question, tables, who is ahead, how it was measured."""
    lines = {line.row.key: line for line in report.lines}
    facts = words.facts({k: v for k, v in report.settings.items() if k != "device"})
    peak = f" Saving everything peaks at {format_bytes(report.plain_peak_bytes)}." if report.plain_peak_bytes else ""
    parts = [f"# {report.model}", f"{facts}.{peak}", f"    {report.command}", say.machine(report)]
    if report.interrupted:
        parts.append("**Interrupted: what follows is not all that was asked for.**")
    parts.append("![peak against step time](picture.svg)")
    if report.budgets:
        parts.append("## At each budget")
        parts.append("\n".join(f"- {say.verdict(result, lines)}" for result in report.budgets))
        parts.append(_duels(report))
    for group, title in say.GROUPS.items():
        rows = [say.cells(line, report.plain_peak_bytes) for line in report.lines if line.row.group == group]
        if rows:
            parts += [f"## {title}", _table(say.COLUMNS, rows)]
    remarks = say.remarks(report)
    parts += ["## How", "\n".join(f"- {remark}" for remark in remarks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _duels(report: BenchReport) -> str:
    several = len({result.peer for result in report.budgets}) > 1
    rows = [
        (
            f"{result.budget.asked}, {result.peer}" if several else result.budget.asked,
            duel.rival,
            say.ratio(duel.ratio),
            str(duel.ratio.rounds),
            duel.verdict,
        )
        for result in report.budgets
        for duel in result.duels
    ]
    return _table(("budget", "rival that fits", "our step time over its", "rounds", "ours is"), rows) if rows else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"| {' | '.join(titles)} |"
    rule = f"|{'|'.join('---' if n == 0 else '--:' for n in range(len(titles)))}|"
    body = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([head, rule, *body])
