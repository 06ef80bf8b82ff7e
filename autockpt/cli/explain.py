"""``autockpt explain``: where the bytes of a step go, and why a plan does what it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autockpt.analysis.explanation import Curve, Explanation, Front, Holding, Slice, resampled
from autockpt.analysis.sentences import basis_mark, choice_words, place_words, reason_words, speed_words
from autockpt.cli.guard import guarded, progress, show
from autockpt.cli.options import DEVICE, arg, flag, opt, takes_workload
from autockpt.errors import InfeasibleError, UsageError
from autockpt.progress import listener
from autockpt.schema import Graph, format_binary, format_bytes, words
from autockpt.schema.graph import Span
from autockpt.schema.run_directory import plan_at
from autockpt.schema.workload import described_by
from autockpt.terminal import bar, bullets, heading, plain_table, print_legend, remarks, shown

WIDE = 108  # columns from which there are longer bars, and a column more
LABEL = 20  # columns in front of a sparkline
UNITS, ALIVE = 6, 8  # lines of each table
LEVELS = " ▁▂▃▄▅▆▇█"


@guarded
@takes_workload
def explain(
    workload: dict[str, Any],
    plan: Path | None = arg("PLAN|RUN", "A plan file, or a run's directory. Without: the workload of --model."),
    *,
    budget: str | None = opt(
        "--budget SIZE", "Explain the plan that fits: 24GB, 60%, 60%act, auto. Default: the plan's."
    ),
    device: str | None = DEVICE,
    hardware: str | None = opt(
        "--hardware NAME",
        "Simulate this device: rtx4090, h100, or a YAML file. Default: what the plan was simulated for.",
    ),
    ops: bool = flag("--ops", "Print every op of the step instead, tab-separated; with --json the whole graph."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Show where a step's bytes go, and what giving some up costs.

    Explains a plan; or the plan that fits a budget; or, with neither, plain training. No step is run: bytes come from
    ghost runs (whole steps on tensors without memory), seconds from op times where any are known. Options that are not
    given are those of the plan. A run is explained from its own files, unless an option asks for another job or names a
    device. Exits with 3 where nothing fits the budget, after explaining the plan with the least peak.
    """
    if plan is not None and not plan.exists():
        raise UsageError(
            f"there is no plan or run {plan}", remedy=f"Check the path; of a model: autockpt explain --model {plan}."
        )
    if ops and budget is not None:
        raise UsageError(
            "--ops prints the step of a plan, or of plain training", remedy="Leave --budget out, or name a plan."
        )
    from autockpt.analysis.explain import explain as explained
    from autockpt.analysis.explain import step_graph

    with listener(progress()) as watcher:
        if ops:
            loaded = plan_at(plan) if plan is not None else None
            spec = described_by(workload, loaded.workload if loaded is not None else None)
            watcher.stage("trace")
            show(step_graph(spec, loaded, hardware=hardware, device=device), print_ops, as_json)
            return
        answer = explained(plan, workload, budget=budget, device=device, hardware=hardware, listener=watcher)
    show(answer, print_explanation, as_json)
    if answer.budget is not None and answer.smallest_peak > answer.budget.bytes:
        raise typer.Exit(InfeasibleError.exit_code)


def print_explanation(answer: Explanation, console: Console) -> None:
    """Print it all, a heading per question."""
    console.print(_heading(answer))
    heading("Where the bytes go", console, holdings_table(answer.holdings, 12 if console.width < WIDE else 24))
    at_peak = answer.moment.op == answer.curve.peak_op
    when = "at the peak" if at_peak else f"at op {answer.moment.op:,}, where that is the most"
    moving = format_binary(sum(s.total for s in answer.units))
    heading(f"Memory by unit, {when}: {moving} of activations and transients", console, _slices(answer.units, UNITS))
    heading("Bytes over time, op by op", console)
    _chart(answer, console)
    then = "then" if at_peak else f"at op {answer.moment.op:,}"
    heading(f"The largest alive {then}", console, _alive(answer, console.width))
    if answer.speed is not None:
        heading("How fast a step is", console, bullets(filter(None, (speed_words(answer), answer.step_note))))
    for front in answer.fronts:
        heading(f"Choices for {front.units}", console, _front(front, answer))
    print_legend((bargain.choice for front in answer.fronts for bargain in front.bargains), console)
    if answer.why is not None:
        heading("Why this plan", console, bullets(reason_words(answer)))
    if answer.budgets:
        heading("Other budgets", console, _budgets(answer))
    how = "a ghost run" if answer.source == "ghost" else "a recorded real step"
    remarks((f"Bytes are simulated by {how}; {answer.basis_note}.", *answer.notes), console)


def _heading(answer: Explanation) -> Text:
    text = Text.assemble((answer.model, "bold"), f" on {answer.device}, {answer.plan} ({answer.status})")
    if facts := words.facts(answer.settings):
        text.append(f"\n{facts}", style="dim")
    text.append("\nPeak ").append(format_bytes(answer.peak_bytes), style="bold")
    if answer.budget is not None:
        room = answer.budget.bytes - answer.peak_bytes
        state = f"{format_binary(room)} free" if room >= 0 else f"{format_binary(-room)} too much"
        text.append(f" of {format_binary(answer.budget.bytes)} (budget {answer.budget.words}): ")
        text.append(state, style="green" if room >= 0 else "red")
    head = any("block" not in choice.roles for choice in answer.choices.values())  # the same in all plans here
    text.append(f"; {'every layer on save' if head else 'save everything'} {format_binary(answer.save_all_peak)}, ")
    text.append(f"leanest plan {format_binary(answer.smallest_peak)} (simulated)")
    if answer.measured_peak is not None and answer.measured_seconds is not None:
        text.append(
            f"\nMeasured: {format_bytes(answer.measured_peak)}, a step {words.seconds(answer.measured_seconds)}"
        )
    text.append(f"\n{words.strip_and_tally(answer.choices)}", style="dim")
    return text


def holdings_table(holdings: Sequence[Holding], width: int) -> Table:
    """Bytes by purpose at the peak, with bars of ``width`` characters, and the most at any op."""
    table, peak = plain_table("", ">at the peak", ">", "", ">most at any op"), sum(h.peak_bytes for h in holdings)
    for h in holdings:
        share = h.peak_bytes / max(1, peak)
        held = (format_binary(h.peak_bytes), words.share(share)) if h.peak_bytes else ("—", "")
        table.add_row(h.name, *held, bar(share, width), format_binary(h.most_bytes))
    table.add_section()
    table.add_row("peak", format_binary(peak), "100.0 %", style="bold")
    return table


def _slices(slices: tuple[Slice, ...], most: int) -> Table:
    """The largest slices; the rest in one line."""
    total = max(1, sum(s.total for s in slices))
    ranked = sorted(slices, key=lambda s: -s.total)
    shown, rest = (ranked, []) if len(ranked) <= most else (ranked[: most - 1], ranked[most - 1 :])
    table = plain_table("unit", ">all", ">share")
    for s in shown:
        name = f"{s.name} ×{s.count} of {format_binary(s.bytes)}" if s.count > 1 else s.name
        table.add_row(name, format_binary(s.total), words.share(s.total / total))
    if rest:
        size = sum(s.total for s in rest)
        table.add_row(f"{len(rest)} more", format_binary(size), words.share(size / total))
    return table


def _chart(answer: Explanation, console: Console) -> None:
    c, columns = answer.curve, max(20, min(console.width, 132) - LABEL - 1)
    for name, line in sparklines(c, columns).items():
        console.print(Text(f"{name:>{LABEL}} {line}"), no_wrap=True, overflow="crop")
    pad, full = " " * (LABEL + 1), f"{LEVELS[-1]} {format_binary(max(c.total, default=0))}"
    console.print(Text(f"{pad}{ruler(c.spans, c.ops, columns)}\n{pad}{full}", style="dim"), overflow="crop")
    where = f" in {c.peak_module}" if c.peak_module else ""
    console.print(Text(f"Peak at op {c.peak_op:,} of {c.ops:,}: {c.peak_target}, {c.peak_phase}{where}"))


def _alive(answer: Explanation, width: int) -> Table:
    table = plain_table(">all", "", "made by", "<in", "shape", *(["what for"] if width >= WIDE else []))
    table.columns[4].no_wrap = True
    for a in answer.moment.alive[:ALIVE]:
        count = f"×{a.count}" if a.count > 1 else ""
        purpose = [a.purpose] if width >= WIDE else []
        shape = f"{'×'.join(map(str, a.shape))} {a.dtype}" if a.dtype else ""  # of an op that is known
        table.add_row(format_binary(a.total), count, a.op, place_words(a), shape, *purpose)
    rest = answer.moment.alive[ALIVE:]
    size = sum(a.total for a in rest) + answer.moment.other_bytes
    count = sum(a.count for a in rest) + answer.moment.other_count
    if count:
        table.add_row(format_binary(size), f"×{count}", "smaller ones", style="dim")
    return table


def _front(front: Front, answer: Explanation) -> Table:
    tilde = basis_mark(answer.basis)
    table = plain_table("<choice", ">keeps", ">extra time", ">per MiB freed", "taken")
    most = max((b.kept_bytes for b in front.bargains), default=0)
    for b in front.bargains:
        freed = most - b.kept_bytes
        price = f"{tilde}{words.seconds(b.extra_seconds / freed * 2**20)}" if freed > 0 else ""
        extra = f"{tilde}{words.seconds(b.extra_seconds)}" if b.extra_seconds else "0"
        taken = f"{b.taken} of {front.count}" if b.taken else ""
        taken += " (copies hide)" if b.hides else ""
        row = (choice_words(b.choice), format_binary(b.kept_bytes), extra, price, taken.strip())
        table.add_row(*row, style="bold" if b.taken else None)
    return table


def _budgets(answer: Explanation) -> Table:
    tilde = basis_mark(answer.basis)
    table = plain_table(">budget", ">", ">peak", ">overhead", "<plan")
    for row in answer.budgets:
        reach = row.reach
        overhead = "—" if reach is None or reach.overhead is None else tilde + words.share(reach.overhead, signed=True)
        table.add_row(
            format_binary(row.budget_bytes),
            answer.budget.words if row.ours and answer.budget is not None else "",
            "nothing fits" if reach is None else format_binary(reach.peak_bytes),
            overhead,
            "" if reach is None else words.tally(reach.choices),
            style="bold" if row.ours else None,
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


def sparklines(curve: Curve, columns: int) -> dict[str, str]:
    """All bytes and those of two kinds through the cycle, a character for each run of ops, its height against the peak.

    Each is that of the op at which the run holds the most.
    """
    at, peak = resampled(curve.total, columns), max(curve.total, default=1)
    lines = {"all": curve.total, "activations etc.": curve.transient, "gradients, optimizer": curve.growing}
    return {name: "".join(LEVELS[round(8 * sizes[i] / peak)] for i in at) for name, sizes in lines.items()}


def ruler(spans: Sequence[Span], ops: int, columns: int) -> str:
    """Phase names under the part of the chart that they take; a bar where each begins."""
    line = [" "] * columns
    for span in spans:
        start = span.start * columns // max(1, ops)
        stop = max(start + 1, span.stop * columns // max(1, ops))
        text = f"|{span.phase}"[: stop - start]
        line[start : start + len(text)] = text
    return "".join(line).rstrip()
