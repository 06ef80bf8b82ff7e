"""``autockpt explain`` on screen: where the bytes go, when they are the most, and what giving some up costs."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from autockpt.reporting import area
from autockpt.reporting.explain_words import (
    basis_mark,
    bound_words,
    choice_words,
    largest_words,
    place_words,
    reason_words,
    shape_words,
    speed_words,
)
from autockpt.reporting.style import bullets, heading, plain_table
from autockpt.schema import format_binary, format_bytes, words
from autockpt.schema.explanation import Explanation, Front, Slice, Speed

WIDE = 108  # columns from which two tables stand side by side
LABEL = 11  # columns of the chart's axis
UNITS, KINDS, ALIVE = 6, 9, 8  # lines of each table
ROWS = 9


def print_explanation(said: Explanation, console: Console) -> None:
    """Print it all, a heading per question."""
    marks = area.marks_of(console.encoding)
    console.print(_heading(said))
    heading("Where the bytes go", console)
    console.print(_holdings(said, marks, 12 if console.width < WIDE else 24))
    at_peak = said.moment.op == said.curve.peak_op
    when = "at the peak" if at_peak else f"at op {said.moment.op:,}, where that is the most"
    heading(f"What comes and goes, {when}: {format_binary(sum(s.total for s in said.units))}", console)
    console.print(_side_by_side(_slices("unit", said.units, UNITS), _slices("kind of op", said.ops, KINDS), console))
    heading("Bytes over time, op by op", console)
    _chart(said, marks, console)
    heading("The largest alive then" if at_peak else f"The largest alive at op {said.moment.op:,}", console)
    console.print(_alive(said, console.width))
    if said.speed is not None:
        heading("Where the seconds go", console)
        console.print(bullets((speed_words(said),)))
        console.print(_parts(said.speed, basis_mark(said.basis)))
        console.print(bullets(bound_words(said.speed)))
    for front in said.fronts:
        heading(f"Choices for {front.units}", console)
        console.print(_front(front, said, marks))
    if said.why is not None:
        heading("Why this plan", console)
        console.print(bullets(reason_words(said)))
    if said.budgets:
        heading("Other budgets and sizes", console)
        console.print(_budgets(said, marks))
        if said.limits:
            console.print(bullets(largest_words(said)))
    if said.notes or said.basis_note:
        console.print()
        how = "a ghost run" if said.source == "ghost" else "a recorded real step"
        console.print(bullets((f"Bytes are simulated by {how}, seconds too: {said.basis_note}.", *said.notes)))


def _heading(said: Explanation) -> Text:
    text = Text()
    text.append(said.model, style="bold")
    text.append(f" on {said.device}, {said.plan} ({said.status})")
    if facts := words.job(said.settings):
        text.append(f"\n{facts}", style="dim")
    text.append("\nPeak ")
    text.append(format_bytes(said.peak_bytes), style="bold")
    if said.budget is not None:
        room = said.budget.bytes - said.peak_bytes
        state = f"{format_binary(room)} free" if room >= 0 else f"{format_binary(-room)} too much"
        text.append(f" of {format_binary(said.budget.bytes)} (budget {said.budget.words}): ")
        text.append(state, style="green" if room >= 0 else "red")
    head = any("block" not in choice.roles for choice in said.choices.values())  # the same in all plans here
    text.append(f"; {'every layer on save' if head else 'save everything'} {format_binary(said.save_all_peak)}, ")
    text.append(f"leanest plan {format_binary(said.smallest_peak)} (simulated)")
    if said.measured_peak is not None and said.measured_seconds is not None:
        text.append(f"\nMeasured: {format_bytes(said.measured_peak)}, a step {words.seconds(said.measured_seconds)}")
    text.append(f"\n{words.strip(said.choices)}  {words.tally(said.choices)}", style="dim")
    return text


def _holdings(said: Explanation, marks: area.Marks, width: int) -> Table:
    table = plain_table("", ">at the peak", ">", "", ">most at any op")
    for h in said.holdings:
        share = h.peak_bytes / max(1, said.peak_bytes)
        filled = area.bar(share, width, marks)
        held = (format_binary(h.peak_bytes), words.share(share)) if h.peak_bytes else ("—", "")
        table.add_row(h.name, *held, filled, format_binary(h.most_bytes))
    table.add_section()
    table.add_row("peak", format_binary(said.peak_bytes), "100.0 %", style="bold")
    return table


def _slices(title: str, slices: tuple[Slice, ...], most: int) -> Table:
    """The largest slices; the rest in one line."""
    total = max(1, sum(s.total for s in slices))
    ranked = sorted(slices, key=lambda s: -s.total)
    shown, rest = (ranked, []) if len(ranked) <= most else (ranked[: most - 1], ranked[most - 1 :])
    several = any(s.count > 1 for s in slices)
    table = plain_table(f"<{title}", *([">each"] if several else []), ">all", ">share")
    for s in shown:
        name = f"{s.name} ×{s.count}" if s.count > 1 else s.name
        each = [format_binary(s.bytes) if s.count > 1 else ""] if several else []
        table.add_row(name, *each, format_binary(s.total), words.share(s.total / total))
    if rest:
        size = sum(s.total for s in rest)
        table.add_row(f"{len(rest)} more", *([""] if several else []), format_binary(size), words.share(size / total))
    return table


def _parts(speed: Speed, mark: str) -> Table:
    table = plain_table("part of the step", ">seconds", ">share", ">TFLOP/s", ">GB/s", "bound by")
    whole = sum(part.seconds for part in speed.parts)
    for part in speed.parts:
        rate = f"{part.flops / part.seconds / 1e12:.3g}" if part.flops else "—"
        # copies take longer than what is waited for
        moved = f"{part.bytes / part.seconds / 1e9:,.0f}" if part.bytes and part.bound != "link" else "—"
        took, share = f"{mark}{words.seconds(part.seconds)}", words.share(part.seconds / whole)
        table.add_row(*map(Text, (part.name, took, share, rate, moved, part.bound or "")))
    return table


def _side_by_side(left: Table, right: Table, console: Console) -> Table | Group:
    if console.width < WIDE:
        return Group(left, Text(), right)
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(left, right)
    return grid


def _chart(said: Explanation, marks: area.Marks, console: Console) -> None:
    columns = max(20, min(console.width, 132) - LABEL - 2)
    budget_bytes = said.budget.bytes if said.budget is not None else None
    drawn = area.draw(said.curve, columns, ROWS, marks, budget_bytes)
    pad = " " * (LABEL + 1)
    size, at = format_binary(said.peak_bytes), drawn.peak_column
    right = f"{marks.peak} {size}"
    mark = " " * at + right if at + len(right) <= columns else f"{size} {marks.peak}".rjust(at + 1)
    console.print(Text(pad + mark, style="bold"), no_wrap=True, overflow="crop")
    for label, line in drawn.lines:
        console.print(Text(f"{label:>{LABEL}}{marks.axis}{line}"), no_wrap=True, overflow="crop")
    bottom = f"{format_binary(drawn.low) if drawn.low else '0':>{LABEL}} "
    ruled = area.ruler(said.curve.spans, said.curve.ops, columns)
    console.print(Text(bottom + ruled, style="dim"), no_wrap=True, overflow="crop")
    legend = f"{marks.fixed} there all the time   {marks.growing} gradients, optimizer   {marks.bar} comes and goes"
    console.print(Text(pad + legend, style="dim"))
    c = said.curve
    where = f" in {c.peak_module}" if c.peak_module else ""
    console.print(Text(f"Peak at op {c.peak_op:,} of {c.ops:,}: {c.peak_target}, {c.peak_phase}{where}"))


def _alive(said: Explanation, width: int) -> Table:
    table = plain_table(">all", "", "made by", "<in", "shape", *(["what for"] if width >= WIDE else []))
    table.columns[3].min_width = 24
    for a in said.moment.alive[:ALIVE]:
        count = f"×{a.count}" if a.count > 1 else ""
        purpose = [a.purpose] if width >= WIDE else []
        table.add_row(format_binary(a.total), count, a.kind, place_words(a), shape_words(a), *purpose)
    rest = said.moment.alive[ALIVE:]
    size = sum(a.total for a in rest) + said.moment.other_bytes
    count = sum(a.count for a in rest) + said.moment.other_count
    if count:
        table.add_row(format_binary(size), f"×{count}", "smaller ones", style="dim")
    return table


def _front(front: Front, said: Explanation, marks: area.Marks) -> Table:
    tilde = basis_mark(said.basis)
    table = plain_table("", "<choice", ">keeps", ">extra time", ">per MiB freed", "taken")
    most = max((b.kept_bytes for b in front.bargains), default=0)
    for b in front.bargains:
        freed = most - b.kept_bytes
        price = f"{tilde}{words.seconds(b.extra_seconds / freed * 2**20)}" if freed > 0 else ""
        extra = f"{tilde}{words.seconds(b.extra_seconds)}" if b.extra_seconds else "0"
        taken = f"{b.taken} of {front.count}" if b.taken else ""
        taken += " (beaten by another)" if b.dominated else ""
        ours, kept = marks.ours if b.taken else "", format_binary(b.kept_bytes)
        row = (ours, choice_words(b.choice), kept, extra, price, taken.strip())
        table.add_row(*row, style="bold" if b.taken else None)
    if front.left_out:
        left_out = words.counted(front.left_out, "choice")
        table.caption = f"{left_out} left out: another keeps no more and costs no more"
    return table


def _budgets(said: Explanation, marks: area.Marks) -> Table:
    tilde = basis_mark(said.basis)
    table = plain_table("", ">budget", ">", ">peak", ">overhead", "<plan")
    for step in said.budgets:
        reach = step.reach
        overhead = "—" if reach is None or reach.overhead is None else tilde + words.share(reach.overhead, signed=True)
        table.add_row(
            marks.ours if step.ours else "",
            format_binary(step.budget_bytes),
            step.label,
            "nothing fits" if reach is None else format_binary(reach.peak_bytes),
            overhead,
            "" if reach is None else words.tally(reach.choices),
            style="bold" if step.ours else None,
        )
    return table
