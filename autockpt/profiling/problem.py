"""From a save-everything ghost run and menus to the linear planning problem that solvers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autockpt.profiling.hidden import hidden_copies
from autockpt.profiling.segments import OpRange, segment_peaks, segments
from autockpt.schema.choices import SAVE
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.problem import Option, Point, Problem, UnitOptions
from autockpt.schema.profile import Menu


def build_problem(
    base: Graph,
    menus: Sequence[Menu],
    budget_bytes: int,
    *,
    price: Mapping[str, float] | None = None,
    margin: int = 0,
    host_budget: int | None = None,
    base_seconds: float | None = None,
    head: Unit | None = None,
    hidden_bandwidth: float = 0.0,
) -> Problem:
    """The problem whose points are the segments of ``base``: every unit's forward and backward, and the times between.

    A point's ``base`` bytes are what the graph really holds there less what the units then hold by their menus, so
    saving everything gives the real bytes exactly, gradients that accumulate and every micro-batch included. ``price``
    multiplies the extra seconds of a choice kind, ``margin`` bytes are left free of ``budget_bytes``, ``host_budget``
    bounds what all units move to the host. ``base_seconds`` is the save-everything step time; without it, the units'
    own share of it. An output ``head`` that has a menu is a unit like the blocks, and the last one. Units are offloaded
    whose copies hide behind compute, as many as ``hidden_bandwidth`` bytes per second of the link have the time for.
    """
    by_kind = {menu.kind: menu for menu in menus}
    planned = [*base.blocks(), *([head] if head is not None else [])]
    units = [_unit(unit.name, by_kind.get(unit.kind), price or {}) for unit in planned]
    saving = [unit.options[0] for unit in units]
    if base_seconds is None:
        base_seconds = sum(by_kind[u.kind].items[0].seconds for u in planned if u.kind in by_kind)
    parts = segments(base, [unit.name for unit in planned])
    before = [0]
    for option in saving:
        before.append(before[-1] + option.kept)
    points = [_point(s, peak, before, saving) for s, peak in zip(parts, segment_peaks(base, parts), strict=True)]
    problem = Problem(
        units=tuple(units),
        points=tuple(points),
        budget_bytes=budget_bytes - margin,
        host_budget=host_budget,
        base_seconds=base_seconds,
        head=None if head is None else head.name,
    )
    if hidden_bandwidth <= 0:
        return problem
    batches = base.repeated + sum(point.own == 0 and point.phase == "forward" for point in points)
    # of units that save; of an output head they are not known
    forwards = {menu.kind: menu.items[0].forward_seconds / batches for menu in menus}
    return hidden_copies(problem, [forwards.get(unit.kind, 0.0) for unit in planned], hidden_bandwidth)


def point_bytes(base: Graph, graph: Graph, head: Unit | None = None) -> tuple[int | None, ...]:
    """Bytes that another plan's ghost run really has at the points of ``base``'s problem, in their order.

    None where it has no op there; a part of it that ``base`` lacks counts to the point before it.
    """
    names = [unit.name for unit in (*base.blocks(), *([head] if head is not None else []))]
    places = {s.key: i for i, s in enumerate(segments(base, names))}
    out: list[int | None] = [None] * len(places)
    parts = segments(graph, names)
    at = 0
    for s, peak in zip(parts, segment_peaks(graph, parts), strict=True):
        at = places.get(s.key, at)
        out[at] = max(out[at] or 0, peak)
    return tuple(out)


def passed_on(base: Graph, units: Sequence[str]) -> dict[str, int]:
    """Bytes that each unit makes in forward and that later ones keep: gone before its own backward begins."""
    spans = {(s.unit, s.place): s for s in reversed(segments(base, units)) if s.micro_batch == 0}
    turn = min((s.first for (_, place), s in spans.items() if place == "backward"), default=len(base.ops))
    found = dict.fromkeys(units, 0)
    for storage in base.storages:
        if storage.unit in found and storage.kind == "activation" and storage.death is not None:
            i = units.index(storage.unit)
            forward, backward = spans.get((i, "forward")), spans.get((i, "backward"))
            if forward is None or backward is None or not forward.first <= storage.birth < forward.end:
                continue
            if turn <= storage.death < backward.first:
                found[storage.unit] += storage.bytes
    return found


def _unit(name: str, menu: Menu | None, price: Mapping[str, float]) -> UnitOptions:
    if menu is None:
        return UnitOptions(name=name, options=(Option(choice=SAVE, seconds=0.0, kept=0, forward=0, backward=0),))
    plain = menu.items[0].seconds
    options = [
        Option(
            choice=item.choice,
            seconds=(item.seconds - plain) * price.get(item.choice.kind, 1.0),
            kept=item.kept_bytes,
            forward=item.forward_peak_bytes,
            backward=item.backward_peak_bytes,
            host=item.host_bytes,
        )
        for item in menu.items
    ]
    return UnitOptions(name=name, options=tuple(options))


def _point(part: OpRange, peak: int, before: Sequence[int], saving: Sequence[Option]) -> Point:
    base = peak - before[part.prefix]
    if part.unit is None or part.place not in ("forward", "backward"):
        return Point(base=base, prefix=part.prefix)
    own = saving[part.unit].forward if part.place == "forward" else saving[part.unit].backward
    return Point(base=base - own, prefix=part.prefix, own=part.unit, phase=part.place)
