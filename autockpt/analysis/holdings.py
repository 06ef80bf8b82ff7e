"""Attribute the bytes of a step: at any moment every byte has exactly one purpose and one unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autockpt.analysis.explanation import Alive, Curve, Holding, Moment, Slice, resampled
from autockpt.schema import Graph, Op, Storage
from autockpt.schema.names import fold, folded
from autockpt.tracing.kernels.timeline import bytes_timeline
from autockpt.tracing.kernels.work import UNTOUCHED, base_name

POINTS = 360  # of a curve: more than a terminal has columns
LISTED = 12  # storages that are listed
REST = "(rest of the model)"
GRADIENTS, TEMPORARY, CASTS, WORKSPACES = "gradients", "optimizer's own", "weights in another type", "kernel workspaces"
GROWING = (GRADIENTS, TEMPORARY)
KEPT, AGAIN, BACK = "kept for backward", "recomputed", "brought back"
RESERVED = "fragmentation and margin"
LOGITS, TRANSIENT = "logits and loss", "transients"
PIPELINE = "kept by the pipeline"  # what a stage receives, and the outputs of the last one
COME_AND_GO = (KEPT, AGAIN, BACK, LOGITS, PIPELINE, TRANSIENT)
UNMADE = "random state"  # what a choice notes down outside of ops: the generators' states
_RESERVING = UNTOUCHED | {"zeros", "zeros_like", "new_zeros"}  # whose results are filled by another op
_RESIDENT = {"weight": "weights", "optimizer": "optimizer states", "other": "buffers and batch"}
_ORDER = ("weights", "optimizer states", "buffers and batch", "at the start", CASTS, GRADIENTS, TEMPORARY, *COME_AND_GO)


class StepBytes:
    """Every storage of a graph with its purpose, and who is alive when.

    ``context_bytes`` are of the device's context; ``peak``: what the step needs of the device, its allocator included.
    """

    def __init__(self, graph: Graph, head: str | None = None, context_bytes: int = 0, peak: int | None = None) -> None:
        self.graph, self.context_bytes = graph, context_bytes
        self.reserved = 0 if peak is None else peak - graph.peak_bytes - context_bytes
        self.makers = makers(graph)
        self._loss = _of_logits(graph, head)
        self._turns = np.array([op.index for op in graph.ops if op.phase in ("backward", "recompute")], dtype=np.int64)
        self.own = [s for s in graph.storages if s.birth >= 0]
        self.purposes = {s.id: self._purpose(s) for s in self.own}

    def coming_and_going(self, op: int) -> list[Storage]:
        """Activations and transients that are alive while an op runs."""
        return [s for s in self.own if s.alive_at(op) and self.purposes[s.id] in COME_AND_GO]

    def holdings(self) -> tuple[Holding, ...]:
        """Bytes by purpose at the peak, which add up to all that is on the device, and the most at any op."""
        at = peak_op(self.graph)
        rows = [
            Holding(
                name=name,
                peak_bytes=int(line[at]) if len(line) else 0,
                most_bytes=int(line.max(initial=0)),
            )
            for name, line in self.timelines.items()
        ]
        rows.sort(key=lambda h: (_ORDER.index(h.name) if h.name in _ORDER else len(_ORDER), h.name))
        if self.context_bytes:
            rows.append(Holding(name="device context", peak_bytes=self.context_bytes, most_bytes=self.context_bytes))
        if self.reserved:
            rows.append(Holding(name=RESERVED, peak_bytes=self.reserved, most_bytes=self.reserved))
        return tuple(h for h in rows if h.most_bytes)

    @cached_property
    def timelines(self) -> dict[str, np.ndarray]:
        """Bytes of each purpose at every op."""
        n = len(self.graph.ops)
        change: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(n + 1, dtype=np.int64))
        parts = self.graph.resident or {"at the start": self.graph.resident_bytes}
        for name, size in parts.items():
            change[name][0] += size
        for s in self.graph.storages:
            name = self.purposes[s.id] if s.birth >= 0 else _died_resident(s, parts)
            if s.birth >= 0:
                change[name][s.birth] += s.bytes
            if s.death is not None and s.death + 1 < n:
                change[name][s.death + 1] -= s.bytes
        return {name: np.cumsum(c[:n]) for name, c in change.items()}

    def together(self, purposes: Sequence[str]) -> np.ndarray:
        """Bytes of these purposes at every op."""
        lines = (line for name, line in self.timelines.items() if name in purposes)
        return sum(lines, np.zeros(len(self.graph.ops), dtype=np.int64))

    def by_unit(self, peak_op: int) -> tuple[Slice, ...]:
        """Transient bytes at an op, by unit; runs of equal ones folded, the rest of the model last."""
        sums: dict[str, int] = defaultdict(int)
        for s in self.coming_and_going(peak_op):
            sums[s.unit or REST] += s.bytes
        rest = sums.pop(REST, 0)
        ordered = {u.name: sums[u.name] for u in self.graph.blocks() if sums.get(u.name)}
        folds = [Slice(name=pattern, bytes=size, count=len(names)) for pattern, names, size in folded(ordered)]
        return (*folds, *([Slice(name=REST, bytes=rest)] if rest else []))

    def made_by(self, storage: Storage) -> str:
        """The name of the op that made a storage: ``native_layer_norm``."""
        if (op := self.makers.get(storage.id)) is not None:
            return base_name(op.target)
        return BACK if self.purposes[storage.id] == BACK else UNMADE

    def _purpose(self, s: Storage) -> str:
        op = self.makers.get(s.id)
        if s.kind == "gradient":
            return GRADIENTS
        if s.kind == "optimizer":
            return TEMPORARY
        if s.kind == "other":
            return WORKSPACES if op is None else CASTS
        phase = self.graph.ops[s.birth].phase
        if self.graph.begins and phase == "forward" and (s.death is None or s.death > self._turns[-1]):
            return PIPELINE
        if s.id in self._loss:
            return LOGITS
        if op is None and phase != "forward":
            return BACK if any(copy.direction == "in" for copy in self.graph.copies) else TRANSIENT
        if phase == "recompute":
            return AGAIN
        return KEPT if phase == "forward" and self._reaches_backward(s) else TRANSIENT

    def _reaches_backward(self, s: Storage) -> bool:
        at = int(np.searchsorted(self._turns, s.birth))
        return at < len(self._turns) and (s.death is None or s.death >= self._turns[at])


def _of_logits(graph: Graph, head: str | None) -> frozenset[int]:
    """Storages of the output head's result, of the loss, and of what stands between them, both ways.

    They are followed along the data, outside of units and up to the next op that multiplies matrices: the head's own
    backward. Without a head only the loss itself is where it begins.
    """
    found: set[int] = set()
    for op in graph.ops:
        if op.unit is not None or op.phase == "optimizer":
            continue
        is_head = head is not None and op.module == head and op.phase != "backward"
        begins = (op.flops > 0 and is_head) or _is_loss(op)
        if begins or (not op.flops and not found.isdisjoint(op.inputs)):
            found.update(out.storage for out in op.outputs)
    return frozenset(found)


def _is_loss(op: Op) -> bool:
    name = base_name(op.target)
    return "_loss" in name or name.startswith(("_log_softmax", "binary_cross_entropy"))


def _died_resident(s: Storage, parts: Mapping[str, int]) -> str:
    """The resident part that a storage of before the cycle belongs to."""
    name = _RESIDENT.get(s.kind, "buffers and batch")
    return name if name in parts else next(iter(parts))


def makers(graph: Graph) -> dict[int, Op]:
    """The op that made the contents of each storage of the cycle: not the one that only reserved its memory."""
    found: dict[int, Op] = {}
    born = {s.id: s.birth for s in graph.storages}
    for op in graph.ops:
        for out in op.outputs:
            known = found.get(out.storage)
            if known is None:
                if born.get(out.storage) == op.index:
                    found[out.storage] = op
            elif base_name(known.target) in _RESERVING and base_name(op.target).endswith("_"):
                found[out.storage] = op
    return found


def _within(module: str, unit: str | None) -> str:
    """A module's name without its unit's in front."""
    return module.removeprefix(unit).lstrip(".") if unit and module.startswith(unit) else module


def joined(names: Sequence[str]) -> str:
    """Names of units, folded into ranges: ``model.layers.0-3, model.layers.7``."""
    return ", ".join(fold(dict.fromkeys(names, 0)))


def peak_op(graph: Graph) -> int:
    """The first op at which the graph holds the most bytes; 0 for a graph without ops."""
    timeline = bytes_timeline(graph)
    return int(np.argmax(timeline)) if len(timeline) else 0


def curve(held: StepBytes) -> Curve:
    """The bytes of a cycle in at most ``POINTS`` runs of ops, each at its worst op, so that no peak is lost."""
    graph = held.graph
    n = len(graph.ops)
    total = bytes_timeline(graph) + held.context_bytes + held.reserved
    at = resampled(total.tolist(), min(POINTS, n))
    at_peak = peak_op(graph)
    op = graph.ops[at_peak] if graph.ops else None
    return Curve(
        total=tuple(total[at].tolist()),
        growing=tuple(held.together(GROWING)[at].tolist()),
        transient=tuple(held.together(COME_AND_GO)[at].tolist()),
        ops=n,
        spans=graph.spans(),
        peak_op=at_peak,
        peak_target=op.target if op else "",
        peak_phase=op.phase if op else "forward",
        peak_module=op.module if op else "",
    )


def telling_op(held: StepBytes) -> int:
    """The op whose storages are shown: that of the peak, or where nothing is transient then, that of the most."""
    at = peak_op(held.graph)
    moving = held.together(COME_AND_GO)
    return at if not len(moving) or moving[at] else int(np.argmax(moving))


def moment(held: StepBytes, at: int, listed: int = LISTED) -> Moment:
    """The op ``at``, and the largest groups of alike transient storages that are alive then."""
    groups: dict[Alive, list[Storage]] = defaultdict(list)
    for s in held.coming_and_going(at):
        op = held.makers.get(s.id)
        outputs = [o for o in op.outputs if o.storage == s.id] if op is not None else []
        meta = max(outputs, key=lambda o: len(o.shape), default=None)
        # what storages of different units have in common when they are the same tensor of equal layers
        alike = Alive(
            op=held.made_by(s),
            place=_within(op.module, s.unit) if op is not None else "",
            units="any" if s.unit is not None else "",
            shape=meta.shape if meta is not None else (),
            dtype=meta.dtype if meta is not None else "",
            bytes=s.bytes,
            purpose=held.purposes[s.id],
        )
        groups[alike].append(s)
    ranked = sorted(groups.items(), key=lambda item: -sum(s.bytes for s in item[1]))
    return Moment(
        op=at,
        alive=tuple(
            alike.model_copy(update={"units": joined([s.unit for s in members if s.unit]), "count": len(members)})
            for alike, members in ranked[:listed]
        ),
        other_bytes=sum(s.bytes for _, members in ranked[listed:] for s in members),
        other_count=sum(len(members) for _, members in ranked[listed:]),
    )
