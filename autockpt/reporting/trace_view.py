"""What a traced step comes to, per unit and over time: in numbers, and ``autockpt trace`` on screen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autockpt.reporting import area
from autockpt.reporting.style import bullets, plain_table, remarks, shown
from autockpt.schema import Data, DevicePeak, Graph, Op, Phase, Storage, Unit, format_binary, format_bytes, words
from autockpt.schema.graph import Span
from autockpt.schema.names import folded, strip_prefixes

REMAINDER = "(rest of the model)"


class UnitSummary(Data):
    """One unit, or a run of units for which every number is the same. Bytes and FLOPs are those of each one.

    Bytes are those of one micro-batch, FLOPs and share those of the whole cycle.
    """

    name: str = Field(description="a unit's name, a range of names, or the remainder")
    cls: str = ""
    count: int = 1
    inner: bool = Field(default=False, description="a sub-unit, whose numbers its block contains, too")
    saved_bytes: int = Field(description="made by the unit's forward and still alive when the forward pass ends")
    boundary_bytes: int = Field(description="inputs from outside that no other unit needs: what recompute would keep")
    flops: int
    share: float = Field(description="of the cycle's FLOPs, all of the run's units together")


class PeakMoment(Data):
    """The moment of most device bytes, and what they are."""

    bytes: int
    op: int
    target: str
    phase: Phase
    module: str
    unit: str | None
    by_kind: dict[str, int] = Field(description="resident, activation, gradient, optimizer, other -> bytes")
    owner: str = Field(description="the unit (or remainder) that holds most of what is not resident")
    owner_bytes: int


class GraphSummary(Data):
    """A graph in numbers that fit on one screen."""

    source: str
    ops: int
    kinds_of_ops: int
    micro_batches: int
    flops: int
    resident_bytes: int
    saved_bytes: int = Field(description="all activations alive at the end of the first forward pass")
    copied_bytes: int = Field(default=0, description="moved off the device during the cycle")
    units: tuple[UnitSummary, ...]
    peak: PeakMoment
    spans: tuple[Span, ...]
    timeline: tuple[int, ...] = Field(description="device bytes: the most in each of equal runs of ops")
    notes: tuple[str, ...] = ()


def summarise(graph: Graph, points: int = 240) -> GraphSummary:
    """Everything that ``autockpt trace`` prints. ``points``: resolution of the timeline."""
    spans = graph.spans()
    tally = _Tally(graph, spans)
    timeline = list(graph.timeline())
    return GraphSummary(
        source=graph.source,
        ops=len(graph.ops),
        kinds_of_ops=len(graph.signatures),
        # a few forward ops may stand between backward and optimizer; only what is differentiated is a micro-batch
        micro_batches=graph.repeated + sum((a.phase, b.phase) == ("forward", "backward") for a, b in pairwise(spans)),
        flops=graph.flops,
        resident_bytes=graph.resident_bytes,
        saved_bytes=tally.kept_bytes,
        copied_bytes=sum(c.bytes * n for c, n in zip(graph.copies, graph.copied, strict=True) if c.direction == "out"),
        units=(*_rows(tally, graph.units), tally.remainder()),
        peak=_peak(graph, timeline),
        spans=spans,
        timeline=tuple(timeline[i] for i in area.resampled(timeline, min(points, len(timeline)))),
        notes=graph.notes,
    )


class _Tally:
    """Bytes of the first micro-batch and FLOPs of the whole cycle, added up by unit."""

    def __init__(self, graph: Graph, spans: Sequence[Span]) -> None:
        self._graph = graph
        self._places: dict[tuple[str | None, str], tuple[str, ...]] = {}
        self._forward = next((s for s in spans if s.phase == "forward"), Span(phase="forward", start=0, stop=0))
        self.kept_bytes = sum(s.bytes for s in self._kept())
        self.saved, self.boundary = self._saved(), self._boundary()
        self.flops: dict[str, int] = defaultdict(int)
        for op, runs in zip(graph.ops, graph.runs, strict=True):
            for unit in self._units_of(op):
                self.flops[unit] += op.flops * runs

    def row(self, unit: Unit) -> UnitSummary:
        return UnitSummary(
            name=unit.name,
            cls=unit.cls,
            inner=unit.role != "block",
            saved_bytes=self.saved[unit.name],
            boundary_bytes=self.boundary[unit.name],
            flops=self.flops[unit.name],
            share=self.flops[unit.name] / max(1, self._graph.flops),
        )

    def remainder(self) -> UnitSummary:
        """All that lies in no block: embedding, head, loss, optimizer."""
        blocks = [u.name for u in self._graph.blocks()]
        flops = self._graph.flops - sum(self.flops[b] for b in blocks)
        return UnitSummary(
            name=REMAINDER,
            saved_bytes=self.kept_bytes - sum(self.saved[b] for b in blocks),
            boundary_bytes=0,
            flops=flops,
            share=flops / max(1, self._graph.flops),
        )

    def _units_of(self, op: Op) -> tuple[str, ...]:
        """The units that an op lies in: its block, and sub-units by the module's name."""
        key = (op.unit, op.module)
        if key not in self._places:
            module = strip_prefixes(op.module) + "."
            self._places[key] = tuple(
                u.name
                for u in self._graph.units
                if (u.name == op.unit if u.role == "block" else module.startswith(u.name + "."))
            )
        return self._places[key]

    def _kept(self) -> list[Storage]:
        """Activations made in the first forward pass and alive past its end."""
        start, stop = self._forward.start, self._forward.stop
        made = (s for s in self._graph.storages if s.kind == "activation" and start <= s.birth < stop)
        return [s for s in made if s.death is None or s.death >= stop]

    def _saved(self) -> dict[str, int]:
        saved: dict[str, int] = defaultdict(int)
        for storage in self._kept():
            for unit in self._units_of(self._graph.ops[storage.birth]):
                saved[unit] += storage.bytes
        return saved

    def _boundary(self) -> dict[str, int]:
        made_in = {s.id: self._units_of(self._graph.ops[s.birth]) for s in self._graph.storages if s.birth >= 0}
        size = {s.id: s.bytes for s in self._graph.storages if s.birth >= 0 and s.kind == "activation"}
        readers: dict[int, set[str]] = defaultdict(set)
        for op in self._graph.ops[self._forward.start : self._forward.stop]:
            for storage in op.inputs:
                readers[storage].update(u for u in self._units_of(op) if u not in made_in.get(storage, ()))
        blocks = {u.name for u in self._graph.blocks()}
        boundary: dict[str, int] = defaultdict(int)
        for storage, units in readers.items():
            # masks and rotary tables are read by every block and kept once, whatever is chosen for any one of them
            if storage in size and len(units & blocks) <= 1:
                for unit in units:
                    boundary[unit] += size[storage]
        return boundary


def _rows(tally: _Tally, units: Sequence[Unit]) -> list[UnitSummary]:
    """Runs of blocks with equal numbers as one row, each followed by the runs of its blocks' sub-units."""
    rows: list[UnitSummary] = []
    for row, members in _folded([tally.row(u) for u in units if u.role == "block"]):
        rows += [row, *(inner for inner, _ in _folded([tally.row(u) for u in units if u.parent in members]))]
    return rows


def _folded(rows: Sequence[UnitSummary]) -> list[tuple[UnitSummary, set[str]]]:
    """Rows with equal numbers and names that follow one another as one, each with the names it stands for."""
    by_name = {r.name: r.model_copy(update={"name": ""}) for r in rows}
    result = []
    for pattern, members, row in folded(by_name):
        update = {"name": pattern, "count": len(members), "share": row.share * len(members)}
        result.append((row.model_copy(update=update), set(members)))
    return result


def _peak(graph: Graph, timeline: Sequence[int]) -> PeakMoment:
    """Where the most bytes are, what they are, and who holds most of them."""
    at = max(range(len(timeline)), key=timeline.__getitem__, default=0)
    by_kind: dict[str, int] = {"resident": graph.resident_bytes}
    by_owner: dict[str, int] = defaultdict(int)
    for s in graph.storages:
        if s.birth < 0:
            # part of the resident bytes; one that has died by now is taken off them
            by_kind["resident"] -= s.bytes if s.death is not None and s.death < at else 0
        elif s.alive_at(at):
            by_kind[s.kind] = by_kind.get(s.kind, 0) + s.bytes
            by_owner[s.unit or REMAINDER] += s.bytes
    owner = max(by_owner, key=by_owner.__getitem__, default=REMAINDER)
    op = graph.ops[at] if graph.ops else Op(index=0, target="", phase="forward", module="", signature=0)
    return PeakMoment(
        bytes=graph.peak_bytes,
        op=at,
        target=op.target,
        phase=op.phase,
        module=op.module,
        unit=op.unit,
        by_kind=by_kind,
        owner=owner,
        owner_bytes=by_owner.get(owner, 0),
    )


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
    remarks(summary.notes, console)


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
