"""Bytes through the step, and what is alive when they are the most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from autockpt.explaining.holdings import COME_AND_GO, GROWING, StepBytes, joined
from autockpt.explaining.kinds import within
from autockpt.reporting.area import resampled
from autockpt.schema import Graph, Storage
from autockpt.schema.explanation import Alive, Curve, Moment
from autockpt.simulator import bytes_timeline

POINTS = 360  # of a curve: more than a terminal has columns
LISTED = 12  # storages that are listed


def peak_op(graph: Graph) -> int:
    """The first op at which the graph holds the most bytes; 0 for a graph without ops."""
    timeline = bytes_timeline(graph)
    return int(np.argmax(timeline)) if len(timeline) else 0


def curve(held: StepBytes, points: int = POINTS) -> Curve:
    """The bytes of a cycle in at most ``points`` runs of ops, each at its worst op, so that no peak is lost."""
    graph = held.graph
    n = len(graph.ops)
    total = bytes_timeline(graph) + held.overhead + held.reserved
    growing, moving = held.together(GROWING), held.together(COME_AND_GO)
    at = resampled(total.tolist(), min(points, n))
    at_peak = peak_op(graph)
    op = graph.ops[at_peak] if graph.ops else None
    return Curve(
        total=tuple(total[at].tolist()),
        fixed=tuple((total - growing - moving)[at].tolist()),
        growing=tuple(growing[at].tolist()),
        ops=n,
        spans=graph.spans(),
        peak_op=at_peak,
        peak_target=op.target if op else "",
        peak_phase=op.phase if op else "forward",
        peak_module=op.module if op else "",
    )


def telling_op(held: StepBytes) -> int:
    """The op whose storages are worth a look: that of the peak, or where nothing comes and goes then, of the most."""
    at = peak_op(held.graph)
    moving = held.together(COME_AND_GO)
    return at if not len(moving) or moving[at] else int(np.argmax(moving))


def moment(held: StepBytes, at: int, listed: int = LISTED) -> Moment:
    """The op ``at``, and the largest groups of alike storages that come and go and are alive then."""
    groups: dict[Alive, list[Storage]] = defaultdict(list)
    for s in held.coming_and_going(at):
        groups[_alike(held, s)].append(s)
    ranked = sorted(groups.items(), key=lambda item: -sum(s.bytes for s in item[1]))
    op = held.graph.ops[at] if held.graph.ops else None
    return Moment(
        op=at,
        target=op.target if op else "",
        phase=op.phase if op else "forward",
        module=op.module if op else "",
        alive=tuple(_counted(alike, members) for alike, members in ranked[:listed]),
        other_bytes=sum(s.bytes for _, members in ranked[listed:] for s in members),
        other_count=sum(len(members) for _, members in ranked[listed:]),
    )


def _alike(held: StepBytes, s: Storage) -> Alive:
    """What storages of different units have in common when they are the same tensor of equal layers."""
    op = held.makers.get(s.id)
    meta = max((o for o in op.outputs if o.storage == s.id), key=lambda o: len(o.shape), default=None) if op else None
    return Alive(
        kind=held.kind_of(s),
        target=op.target if op else "",
        place=within(op.module, s.unit) if op else "",
        units="any" if s.unit is not None else "",
        shape=meta.shape if meta else (),
        dtype=meta.dtype if meta else "",
        bytes=s.bytes,
        purpose=held.purposes[s.id],
    )


def _counted(alike: Alive, members: Sequence[Storage]) -> Alive:
    units = list(dict.fromkeys(s.unit for s in members if s.unit is not None))
    return alike.model_copy(update={"units": joined(units), "count": len(members)})
