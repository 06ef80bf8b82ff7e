"""A bench as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autockpt.schema import format_binary, format_bytes, words
from tests.evidence.bench.report import BenchLine, BenchReport, BudgetResult, Ratio

COLUMNS = ("method", "peak", "of plain", "step", "overhead", "95 % interval")
GROUPS = {"eager": "Eager", "compiled": "Compiled (torch.compile), over compiled with budget 1"}
NOT_MEASURED = {
    "out_of_memory": "out of memory",
    "infeasible": "nothing fits",
    "failed": "failed",
    "missing": "not here",
}


def bench_page(report: BenchReport) -> str:
    """The whole page: question, tables, who is ahead, how it was measured."""
    lines = {line.row.key: line for line in report.lines}
    facts = words.facts({k: v for k, v in report.settings.items() if k != "device"})
    peak = f" Saving everything peaks at {format_bytes(report.plain_peak_bytes)}." if report.plain_peak_bytes else ""
    parts = [f"# {report.model}", f"{facts}.{peak}", f"    {report.command}", _machine(report)]
    if report.interrupted:
        parts.append("**Interrupted: what follows is not all that was asked for.**")
    if report.budgets:
        parts.append("## At each budget")
        parts.append("\n".join(f"- {_verdict(result, lines)}" for result in report.budgets))
        parts.append(_duels(report))
    for group, title in GROUPS.items():
        rows = [_cells(line, report.plain_peak_bytes) for line in report.lines if line.row.group == group]
        if rows:
            parts += [f"## {title}", _table(COLUMNS, rows)]
    parts += ["## How", "\n".join(f"- {remark}" for remark in _remarks(report))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _duels(report: BenchReport) -> str:
    several = len({result.peer for result in report.budgets}) > 1
    rows = [
        (
            f"{result.budget.asked}, {result.peer}" if several else result.budget.asked,
            duel.rival,
            _ratio(duel.ratio),
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


def _cells(line: BenchLine, plain_peak: int | None) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    row = line.row
    peak = format_binary(row.peak_bytes) if row.peak_bytes is not None else "—"
    share = words.share(row.peak_bytes / plain_peak) if row.peak_bytes is not None and plain_peak else "—"
    if row.state != "measured" or line.step_seconds is None:
        return (row.key, peak, share, NOT_MEASURED.get(row.state, "not timed"), "—", "—")
    noise = f" ±{line.noise * 100:.1f} %" if line.noise is not None and line.noise < words.USELESS_NOISE else ""
    over, reach = "—", "—"
    if line.overhead is not None:
        low, high = line.overhead.low, line.overhead.high
        over, reach = _signed(line.overhead.value), "unknown" if high is None else f"{_signed(low)} … {_signed(high)}"
    return (row.key, peak, share, words.seconds(line.step_seconds) + noise, over, reach)


def _signed(ratio: float) -> str:
    return words.share(ratio - 1, signed=True)


def _ratio(value: Ratio) -> str:
    """``0.957 [0.951, 0.964]``."""
    high = "∞" if value.high is None else f"{value.high:.3f}"
    return f"{value.value:.3f} [{value.low:.3f}, {high}]"


def _verdict(result: BudgetResult, lines: dict[str, BenchLine]) -> str:
    """Who is ahead at a budget, in one or two sentences."""
    head = f"{result.budget.asked} ({format_binary(result.budget.bytes)}): "
    said = head + (_ours(result, lines) if result.ours else f"{result.note}.")
    if result.compiled and (line := lines.get(result.compiled)) and line.step_seconds:
        said += f" Fastest compiled that fits: {result.compiled}, {words.seconds(line.step_seconds)}."
    return said


def _ours(result: BudgetResult, lines: dict[str, BenchLine]) -> str:
    assert result.ours is not None
    ours = lines[result.ours]
    own = f"{result.peer} {_signed(ours.overhead.value)}" if ours.overhead else result.peer
    if not result.duels:
        return f"{own}. {result.note or 'Not timed alongside the others yet'}."
    first = result.duels[0]
    rival = lines.get(first.rival)
    theirs = f" at {_signed(rival.overhead.value)}" if rival and rival.overhead else ""
    counts = Counter(duel.verdict for duel in result.duels)
    tally = ", ".join(f"{word} than {counts[word]}" for word in ("faster", "slower") if counts[word])
    undecided = f"{counts['undecided']} undecided" if counts["undecided"] else ""
    of_all = ", ".join(filter(None, (tally, undecided)))
    stopped = "" if first.settled else f" (interval still wider than asked for after {first.ratio.rounds} rounds)"
    return (
        f"{own}; fastest other that fits: {first.rival}{theirs}. Step time over its: {_ratio(first.ratio)}, "
        f"{first.verdict}{stopped}. Of {len(result.duels)} that fit: {of_all}."
    )


def _gist(said: str) -> str:
    if said.startswith("equal with"):
        return "equal with plain training's up to rounding"
    return "bit-equal with plain training's" if said == "bit-equal" else said


def _machine(report: BenchReport) -> str:
    """Device, threads, platform and versions."""
    device = report.environment.device
    threads = f", {words.counted(device.threads, 'thread')}" if device.threads else ""
    versions = ", ".join(f"{name} {value}" for name, value in report.environment.versions.items())
    return f"{device.name}{threads}; {report.environment.platform}; {versions}"


def _rounds(report: BenchReport) -> str:
    """How much was measured and how noisy it was."""
    timed = [line for line in report.lines if line.rounds]
    if not timed:
        return "Nothing was timed yet."
    least, most = min(line.rounds for line in timed), max(line.rounds for line in timed)
    spread = sorted(line.noise for line in timed if line.noise is not None)
    half = spread[len(spread) // 2] if spread else 1.0
    middle = f"{half * 100:.1f} % of it" if half < words.USELESS_NOISE else "unknown"
    span = words.counted(most, "round") if least == most else f"{least} to {most} rounds"
    return (
        f"{words.counted(len(timed), 'row')} timed in {span}, interleaved; half the 95 % interval of a median "
        f"is {middle} in the middle case. Ratios are of paired rounds (Hodges-Lehmann, signed-rank interval), "
        f"wanted within ±{report.within * 100:g} %, at most {report.most_rounds} rounds."
    )


def _remarks(report: BenchReport) -> list[str]:
    """All that the tables do not say: how it was timed, what our plans and compiling took, gradients, failures."""
    found, rows = [_rounds(report)], [line.row for line in report.lines]
    for row in rows:
        if (cost := row.search) is not None:
            found.append(
                f"{row.key}: {words.counted(cost.trials, 'trial')} in {words.seconds(cost.seconds)}, "
                f"{words.seconds(cost.measured_seconds)} of them measured steps"
                + (f", {words.seconds(cost.compile_seconds)} compiling" if cost.compile_seconds else "")
            )
    compiled = [f"{row.key} {words.seconds(row.compile_seconds)}" for row in rows if row.compile_seconds]
    if compiled:
        found.append(f"compiling, what was known from earlier rows or runs left out: {', '.join(compiled)}")
    gradients = Counter(_gist(row.gradients) for row in rows if row.gradients)
    found += [f"gradients {what}: {words.counted(n, 'row')}" for what, n in gradients.most_common()]
    found += [f"{row.key}: {row.message}" for row in rows if row.message]
    return [*found, *report.notes]
