"""``autockpt trace`` on screen: the table per unit, bytes over time, where the peak is and whose it is."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autockpt.reporting import area
from autockpt.reporting.graph_summary import GraphSummary, UnitSummary
from autockpt.reporting.style import bullets, plain_table
from autockpt.reporting.terminal import shown
from autockpt.schema import DevicePeak, Graph, format_binary, format_bytes, words

WIDE = 100
_KINDS = {
    "resident": "weights, optimizer states and batch",
    "activation": "activations",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "weight": "weights",
    "other": "other",
}


def print_summary(summary: GraphSummary, settings: Mapping[str, object], console: Console) -> None:
    """Print a summary of a traced step. ``settings``: resolved facts of the workload."""
    if facts := words.facts(settings):
        console.print(Text(facts, style="dim"))
    how = "ghost run" if summary.source == "ghost" else "a real step, recorded"
    counts = (
        f"{words.counted(summary.ops, 'op')} of {words.counted(summary.kinds_of_ops, 'kind')}",
        words.flops(summary.flops),
        words.counted(summary.micro_batches, "micro-batch", "micro-batches"),
    )
    console.print(Text(f"{', '.join(counts)} ({how})"))
    console.print()
    console.print(_unit_table(summary, console.width))
    console.print()
    _print_timeline(summary, console)
    if summary.notes:
        console.print()
        console.print(bullets(summary.notes))


def _unit_table(summary: GraphSummary, width: int) -> Table:
    """One row per run of equal units, sub-units indented under their block. Narrow screens go without classes."""
    wide = width >= WIDE
    table = plain_table("<unit", ">", *(["<class"] if wide else []), ">saved", ">boundary", ">FLOPs", ">share")
    block = ""
    for row in summary.units:
        name = f"  {row.name.removeprefix(block)}" if row.inner else row.name
        table.add_row(*_cells(row, name, wide), style="dim" if row.inner else None)
        block = block if row.inner else row.name
    table.add_section()
    total = UnitSummary(name="all", saved_bytes=summary.saved_bytes, boundary_bytes=0, flops=summary.flops, share=1.0)
    table.add_row(*_cells(total, "all", wide), style="bold")
    return table


def _cells(row: UnitSummary, name: str, wide: bool) -> list[str]:
    return [
        name,
        f"×{row.count}" if row.count > 1 else "",
        *([row.cls] if wide else []),
        format_binary(row.saved_bytes),
        format_binary(row.boundary_bytes) if row.boundary_bytes else "—",
        words.flops(row.flops),
        words.share(row.share),
    ]


def print_device_peak(peak: DevicePeak, device: str, memory_bytes: int, console: Console) -> None:
    """What the device's allocator makes of a step. ``memory_bytes``: what the device has."""
    answer = "fits" if peak.fits else "does not fit"
    console.print(
        f"On {device}, simulated: {format_bytes(peak.total)}, {answer} in {format_binary(memory_bytes)}; "
        f"tensors {format_binary(peak.allocated)} (matrix workspaces {format_binary(peak.workspace)} of it), "
        f"fragmentation {format_binary(peak.fragmentation)}, context {format_binary(peak.context)}"
    )


def _print_timeline(summary: GraphSummary, console: Console) -> None:
    """The sparkline with its phases under it, and the peak in words."""
    width = max(20, min(console.width, 120))
    levels = area.BLOCKS if area.encodes(console.encoding) else area.ASCII
    values = [summary.timeline[i] for i in area.resampled(summary.timeline, width)] or [0] * width
    peak = summary.peak
    column = values.index(max(values))
    console.print(f"Bytes over time, op by op: from {format_binary(min(values))} to {format_bytes(peak.bytes)}")
    console.print(Text(area.sparkline(values, min(values), peak.bytes, levels)), no_wrap=True, overflow="crop")
    console.print(Text(area.ruler(summary.spans, summary.ops, width), style="dim"), no_wrap=True, overflow="crop")
    console.print(Text(" " * column + "^ peak" if column < width - 6 else "peak ^".rjust(column + 1)), no_wrap=True)
    where = f" in {peak.module}" if peak.module else ""
    console.print(Text(f"Peak {format_bytes(peak.bytes)} at op {peak.op:,}: {peak.target}, {peak.phase}{where}"))
    held = ", ".join(f"{_KINDS.get(k, k)} {format_binary(v)}" for k, v in peak.by_kind.items() if v)
    details = [
        f"made of {held}",
        f"most of what comes and goes is held by {peak.owner}: {format_binary(peak.owner_bytes)}",
    ]
    if summary.copied_bytes:
        details.append(f"moved off the device during the step: {format_bytes(summary.copied_bytes)}")
    console.print(bullets(details, mark=" "))


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
