"""``autockpt explain`` on screen: where the bytes go, when they are the most, and what giving some up costs."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from autockpt.reporting import area
from autockpt.reporting.style import bullets, heading, plain_table, print_legend, remarks, shown
from autockpt.schema import Choice, Graph, Remake, Selective, format_binary, format_bytes, words
from autockpt.schema.explanation import Alive, Basis, Explanation, Front, Reach, Slice, Speed
from autockpt.schema.known import NONE

WIDE = 108  # columns from which two tables stand side by side
LABEL = 11  # columns of the chart's axis
UNITS, KINDS, ALIVE = 6, 9, 8  # lines of each table
ROWS = 9
_IN_OPTIMIZER = " The peak lies in the optimizer step, when no activations are left: no choice for them lowers it."
LONG = 46  # columns of a choice
WORTH = 0.01  # share of a step from which it is said what bounds a part


def print_explanation(said: Explanation, console: Console) -> None:
    """Print it all, a heading per question."""
    marks = area.marks_of(console.encoding)
    console.print(_heading(said))
    heading("Where the bytes go", console, _holdings(said, marks, 12 if console.width < WIDE else 24))
    at_peak = said.moment.op == said.curve.peak_op
    when = "at the peak" if at_peak else f"at op {said.moment.op:,}, where that is the most"
    tables = _side_by_side(_slices("unit", said.units, UNITS), _slices("kind of op", said.ops, KINDS), console)
    heading(f"What comes and goes, {when}: {format_binary(sum(s.total for s in said.units))}", console, tables)
    heading("Bytes over time, op by op", console)
    _chart(said, marks, console)
    then = "then" if at_peak else f"at op {said.moment.op:,}"
    heading(f"The largest alive {then}", console, _alive(said, console.width))
    if said.speed is not None:
        parts = _parts(said.speed, basis_mark(said.basis))
        step = bullets(filter(None, (speed_words(said), said.step_note)))
        heading("Where the seconds go", console, step, parts, bullets(bound_words(said.speed)))
    for front in said.fronts:
        heading(f"Choices for {front.units}", console, _front(front, said, marks))
    print_legend((bargain.choice for front in said.fronts for bargain in front.bargains), console)
    if said.why is not None:
        heading("Why this plan", console, bullets(reason_words(said)))
    if said.budgets:
        limits = [bullets(largest_words(said))] if said.limits else []
        heading("Other budgets and sizes", console, _budgets(said, marks), *limits)
    if said.notes or said.basis_note:
        how = "a ghost run" if said.source == "ghost" else "a recorded real step"
        remarks((f"Bytes are simulated by {how}, seconds too: {said.basis_note}.", *said.notes), console)


def _heading(said: Explanation) -> Text:
    text = Text.assemble((said.model, "bold"), f" on {said.device}, {said.plan} ({said.status})")
    if facts := words.job(said.settings):
        text.append(f"\n{facts}", style="dim")
    text.append("\nPeak ").append(format_bytes(said.peak_bytes), style="bold")
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
        held = (format_binary(h.peak_bytes), words.share(share)) if h.peak_bytes else ("—", "")
        table.add_row(h.name, *held, area.bar(share, width, marks), format_binary(h.most_bytes))
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
    table.add_section()
    table.add_row("together, by op times", f"{mark}{words.seconds(whole)}", "100.0 %", style="bold")
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
    c = said.curve
    bottom = f"{format_binary(drawn.low) if drawn.low else '0':>{LABEL}} {area.ruler(c.spans, c.ops, columns)}"
    console.print(Text(bottom, style="dim"), no_wrap=True, overflow="crop")
    legend = f"{marks.fixed} there all the time   {marks.growing} gradients, optimizer   {marks.bar} comes and goes"
    console.print(Text(pad + legend, style="dim"))
    where = f" in {c.peak_module}" if c.peak_module else ""
    console.print(Text(f"Peak at op {c.peak_op:,} of {c.ops:,}: {c.peak_target}, {c.peak_phase}{where}"))


def _alive(said: Explanation, width: int) -> Table:
    table = plain_table(">all", "", "made by", "<in", "shape", *(["what for"] if width >= WIDE else []))
    table.columns[3].min_width = 24
    for a in said.moment.alive[:ALIVE]:
        count = f"×{a.count}" if a.count > 1 else ""
        purpose = [a.purpose] if width >= WIDE else []
        shape = f"{'×'.join(map(str, a.shape))} {a.dtype}" if a.dtype else ""  # of an op that is known
        table.add_row(format_binary(a.total), count, a.kind, place_words(a), shape, *purpose)
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
        taken += " (copies hide)" if b.hides else " (beaten by another)" if b.dominated else ""
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


def print_ops(graph: Graph, console: Console) -> None:
    """One line per op, as wide as it is: for ``less -S`` and ``grep``."""
    # past rich, which would turn the tabs into spaces
    print("op\tphase\ttarget\tmodule\toutputs\tbytes\tFLOPs\tdevice bytes", file=console.file)
    size = {s.id: s.bytes for s in graph.storages}
    born = {s.id: s.birth for s in graph.storages}
    for op, held in zip(graph.ops, graph.timeline(), strict=True):
        outputs = " ".join(f"{o.dtype}{list(o.shape)}" for o in op.outputs)
        fresh = sum(size.get(i, 0) for i in {o.storage for o in op.outputs} if born.get(i) == op.index)
        cells = (op.index, op.phase, op.target, op.module or "-", outputs or "-", fresh, op.flops, held)
        print("\t".join(shown(str(c)) for c in cells), file=console.file)


def choice_words(choice: Choice) -> str:
    """A choice with its options; a long list of what it keeps as its length."""
    text = str(choice)
    if len(text) <= LONG or not isinstance(choice, Remake | Selective):
        return text
    return f"{choice.kind} (keeps {words.counted(len(choice.keep), 'output')})"


def basis_mark(basis: Basis) -> str:
    """What stands before seconds that rest on no measurement of this device."""
    return "" if basis == "measured" else "~"


def place_words(a: Alive) -> str:
    """Where alike storages are: their units, the first of many runs named, and the module within."""
    runs = a.units.split(", ")
    units = a.units if len(runs) <= 2 else f"{runs[0]} and {len(runs) - 1} more runs"
    return ", ".join(p for p in (units, a.place) if p) or "the rest of the model"


def reason_words(said: Explanation) -> list[str]:
    """Why the plan is what it is: what less and more memory would change."""
    why, tilde = said.why, basis_mark(said.basis)
    assert why is not None
    chosen = why.chosen
    by_ops = f"{tilde}{words.seconds(chosen.step_seconds)}{_over(chosen, tilde)}"
    # rates of other hardware are no reason to doubt what was measured
    measured = _measured_words(said) if said.basis == "nominal" else []
    if measured:
        lines = measured
    elif said.measured_seconds is not None:
        took = words.seconds(said.measured_seconds)
        lines = [f"A step took {took}, as measured with the plan. By the times of its ops, as all below: {by_ops}."]
    else:
        lines = [f"A step takes {by_ops}."]
    if not measured and why.best is not None:
        saved, more = chosen.step_seconds - why.best.step_seconds, why.best.peak_bytes - chosen.peak_bytes
        needs = f"{format_binary(more)} more and fits the budget too" if more > 0 else "no more bytes"
        lines.append(
            f"By these times another plan, which needs {needs}, is {tilde}{words.seconds(saved)} faster a step "
            f"({words.share(saved / chosen.step_seconds)}): {difference(chosen.choices, why.best.choices)}."
        )
    if why.leaner is not None:
        lines.append(_step("The next plan below", why.leaner, chosen, why.price_down, tilde))
    else:
        lines.append("There is no leaner plan." + (_IN_OPTIMIZER if said.curve.peak_phase == "optimizer" else ""))
    if why.faster is not None:
        lines.append(_step("The next faster plan", why.faster, chosen, why.price_up, tilde))
    return lines


def _measured_words(said: Explanation) -> list[str]:
    """What the search measured: the plan, and those interleaved with it."""
    if said.measured_seconds is None:
        return []
    plain = next((row.measured for row in said.beside if row.name == NONE and row.measured), None)
    over = said.measured_seconds / plain.step_seconds - 1 if plain else None
    reach = Reach(peak_bytes=said.peak_bytes, step_seconds=said.measured_seconds, overhead=over, choices=said.choices)
    lines = [f"A step took {words.seconds(said.measured_seconds)}{_over(reach, '')}, as measured with the plan."]
    rows = [
        f"{row.name} took {words.seconds(row.measured.step_seconds)} with {format_binary(row.measured.peak_bytes)}"
        for row in said.beside
        if row.measured
    ]
    if rows:
        lines.append(f"Measured alongside it: {'; '.join(rows)}.")
    lines.append("What is said of other plans (~) is modelled at nominal rates: it ranks none above what was measured.")
    return lines


def _over(reach: Reach, tilde: str) -> str:
    if reach.overhead is None:
        return ""
    if abs(reach.overhead) < 5e-4:
        return ", as long as saving everything"
    side = "over" if reach.overhead > 0 else "under"
    return f", {tilde}{words.share(abs(reach.overhead))} {side} saving everything"


def _step(what: str, other: Reach, chosen: Reach, price: float | None, tilde: str) -> str:
    bytes_, seconds = other.peak_bytes - chosen.peak_bytes, other.step_seconds - chosen.step_seconds
    moved = f"{format_binary(abs(bytes_))} {'more' if bytes_ > 0 else 'less'}"
    side = "slower" if seconds >= 0 else "faster"
    if abs(seconds) < 5e-4 * chosen.step_seconds:
        time = f"is hardly {side}"
    else:
        time = f"is {tilde}{words.seconds(abs(seconds))} {side}"
        time += f", {tilde}{words.seconds(price * 2**20)} per MiB" if price is not None and price > 0 else ""
    return f"{what} needs {moved} and {time}: {difference(chosen.choices, other.choices)}."


def difference(before: Mapping[str, Choice], after: Mapping[str, Choice]) -> str:
    """What changes between two plans: ``3 layers from recompute to save``, the most first."""
    moves: dict[tuple[str, str], int] = {}
    for name in {**before, **after}:
        old, new = (choice_words(c[name]) if name in c else "save" for c in (before, after))
        if old != new:
            moves[old, new] = moves.get((old, new), 0) + 1
    ranked = sorted(moves.items(), key=lambda m: (-m[1], m[0]))
    said = [f"{words.counted(n, 'layer')} from {old} to {new}" for (old, new), n in ranked[:3]]
    more = sum(n for _, n in ranked[3:])
    return (", ".join(said) + (f", {more} more" if more else "")) if said else "the same choices"


def largest_words(said: Explanation) -> list[str]:
    """The largest sizes under the budget, one line per dimension."""
    out = []
    for dimension in dict.fromkeys(limit.dimension for limit in said.limits):
        group = [limit for limit in said.limits if limit.dimension == dimension]
        parts = []
        for limit in group:
            size = "not known" if limit.why else "none fits"
            if limit.value is not None:
                size = f"{limit.value:,}{' or more' if limit.open_ended else ''}"
            how = "saving everything" if limit.plan == "save everything" else "with the leanest plan"
            parts.append(f"{size} {how}")
        reasons = dict.fromkeys(limit.why for limit in group if (limit.open_ended or limit.value is None) and limit.why)
        more = f" ({'; '.join(reasons)})" if reasons else ""
        out.append(
            f"largest {dimension} within this budget: {', '.join(parts)}; now {group[0].now:,}{more} (simulated)"
        )
    return out


_FOLLOWS = {
    "arithmetic": "recomputing it costs what it cost: keep its matrix products first",
    "bandwidth": "cheap to make again for the bytes it keeps: recompute or remake it first",
    "link": "copies are not hidden behind compute: offload fewer layers, or recompute",
    "launches": "the device waits for Python: larger batches or torch.compile help it, and recomputing launches again",
}


def speed_words(said: Explanation) -> str:
    """Step time, what it comes to in FLOP/s, utilisation and tokens per second, and the bytes held on average."""
    speed = said.speed
    assert speed is not None
    parts = rates(speed, "" if said.measured_seconds is not None else basis_mark(said.basis))
    share = words.share(speed.average_bytes / max(1, said.peak_bytes))
    return f"{', '.join(parts)}; on average {format_binary(speed.average_bytes)} are held, {share} of the peak"


def rates(speed: Speed, mark: str) -> list[str]:
    """Step time, FLOP/s, utilisation and tokens per second, as far as they are known; ``mark`` before each."""
    parts = [f"a step takes {mark}{words.seconds(speed.seconds)}"]
    if speed.flops:
        parts.append(f"{mark}{speed.flops / speed.seconds / 1e12:.3g} TFLOP/s")
    if speed.utilisation is not None and speed.model_flops:
        parts.append(f"{mark}{words.share(speed.utilisation)} model FLOPs utilisation")
    if speed.tokens is not None:
        parts.append(f"{mark}{speed.tokens / speed.seconds:,.0f} tokens/s")
    return parts


def bound_words(speed: Speed) -> tuple[str, ...]:
    """What follows for the choices from what bounds the parts of a step."""
    found: dict[str, list[str]] = {}
    whole = sum(part.seconds for part in speed.parts)
    for part in speed.parts:
        if part.bound is not None and part.seconds >= WORTH * whole:
            found.setdefault(part.bound, []).append(part.name)
    said = tuple(f"bound by {bound} ({', '.join(names)}): {_FOLLOWS[bound]}" for bound, names in found.items())
    return said or ("what bounds each part is said for devices that are described: --hardware",)
