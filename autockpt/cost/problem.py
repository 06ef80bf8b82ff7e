"""Pose the planning problem for the solver: units with their options, and the bytes at each point of the step.

Also which units can be offloaded for free, as their copies hide behind compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from autockpt.cost.op_ranges import OpRange, op_ranges, range_peaks
from autockpt.schema.choices import OFFLOAD, Offload
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.profile import Menu
from autockpt.solvers.problem import Option, Point, Problem, UnitOptions


def build_problem(
    base: Graph,
    menus: Sequence[Menu],
    budget_bytes: int,
    *,
    scale: Mapping[str, float] | None = None,
    host_budget: int | None = None,
    base_seconds: float = 0.0,
    head: Unit | None = None,
    hidden_bandwidth: float = 0.0,
) -> Problem:
    """The planning problem whose points are the op ranges of ``base``, the ghost run of plain training.

    A point's ``base`` bytes are what the graph holds there less what the menus say that units hold. So plain training
    gets its exact bytes, accumulated gradients and all micro-batches included. ``scale`` has factors on the extra
    seconds by kind of choice, ``host_budget`` bounds the bytes of all units on the host, ``base_seconds`` is the time
    of the plain step. An output ``head`` that has a menu is the last unit. As many units are nearly free to offload as
    ``hidden_bandwidth`` bytes per second of the link allow.
    """
    by_kind = {menu.kind: menu for menu in menus}
    planned = [*base.blocks(), *([head] if head is not None else [])]
    units = [_unit(unit.name, by_kind[unit.kind], scale or {}) for unit in planned]
    saving = [unit.options[0] for unit in units]
    ranges = op_ranges(base, [unit.name for unit in planned])
    before = [0]
    for option in saving:
        before.append(before[-1] + option.kept)
    whole = base.in_flight > 1
    points = [_point(r, peak, before, saving, whole) for r, peak in zip(ranges, range_peaks(base, ranges), strict=True)]
    problem = Problem(
        units=tuple(units),
        points=tuple(points),
        budget_bytes=budget_bytes,
        host_budget=host_budget,
        base_seconds=base_seconds,
        head=None if head is None else head.name,
    )
    if hidden_bandwidth <= 0:
        return problem
    batches = base.repeated + sum(r.unit == 0 and r.part == "forward" for r in ranges)
    # with saving; those of an output head are not known
    forwards = {menu.kind: menu.items[0].forward_seconds / batches for menu in menus}
    return hidden_copies(problem, [forwards.get(unit.kind, 0.0) for unit in planned], hidden_bandwidth)


def point_bytes(base: Graph, graph: Graph, head: Unit | None = None) -> tuple[int | None, ...]:
    """The bytes of another plan's ghost run at the points of the problem of ``base``, in their order.

    None where it has no ops. A range that ``base`` lacks counts to the point before it.
    """
    names = [unit.name for unit in (*base.blocks(), *([head] if head is not None else []))]
    places = {r.key: i for i, r in enumerate(op_ranges(base, names))}
    out: list[int | None] = [None] * len(places)
    ranges = op_ranges(graph, names)
    at = 0
    for r, peak in zip(ranges, range_peaks(graph, ranges), strict=True):
        at = places.get(r.key, at)
        out[at] = max(out[at] or 0, peak)
    return tuple(out)


def passed_on(base: Graph, units: Sequence[str]) -> dict[str, int]:
    """Bytes that each unit makes in forward and that are freed before its own backward, as later units keep them."""
    spans = {(r.unit, r.part): r for r in reversed(op_ranges(base, units)) if r.micro_batch == 0}
    turn = min((r.first for (_, part), r in spans.items() if part == "backward"), default=len(base.ops))
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


def _unit(name: str, menu: Menu, scale: Mapping[str, float]) -> UnitOptions:
    plain = menu.items[0].seconds
    options = [
        Option(
            choice=item.choice,
            seconds=(item.seconds - plain) * scale.get(item.choice.kind, 1.0),
            kept=item.kept_bytes,
            forward=item.forward_peak_bytes,
            backward=item.backward_peak_bytes,
            host=item.host_bytes,
        )
        for item in menu.items
    ]
    return UnitOptions(name=name, options=tuple(options))


def _point(op_range: OpRange, peak: int, before: Sequence[int], saving: Sequence[Option], whole: bool) -> Point:
    """The point of an op range.

    ``whole``: a stage of a pipeline holds other micro-batches, whose bytes the menus include. So choices on all units
    count wherever its last unit does not run.
    """
    if whole and op_range.part != "optimizer" and op_range.prefix < len(saving) - 1:
        return Point(base=peak - before[-1], prefix=len(saving))
    base = peak - before[op_range.prefix]
    if op_range.unit is None or op_range.part not in ("forward", "backward"):
        return Point(base=base, prefix=op_range.prefix)
    own = saving[op_range.unit].forward if op_range.part == "forward" else saving[op_range.unit].backward
    return Point(base=base - own, prefix=op_range.prefix, own=op_range.unit, phase=op_range.part)


NEARLY_FREE = 0.02
"""The share of their seconds that hidden copies still cost, so that no unit is offloaded without need."""


def hidden_copies(problem: Problem, forwards: Sequence[float], bandwidth: float) -> Problem:
    """The problem with nearly free ``offload`` for as many units as the link has time for.

    ``forwards`` are seconds of each unit's forward, ``bandwidth`` is in bytes per second off the device. The link
    serves one unit after the other, and the ``window`` of each ends with its copies. Units whose copies would not end
    before the last forward keep their costs, and so do units that the host has no room for.
    """
    spans = list(pairwise(accumulate(forwards, initial=0.0)))
    found: list[UnitOptions] = []
    free, room = 0.0, problem.host_budget
    for place, (unit, (begin, end)) in enumerate(zip(problem.units, spans, strict=True)):
        offered = next((option for option in unit.options if option.choice == OFFLOAD), None)
        if offered is not None and free <= end and (room is None or offered.host <= room):
            done = max(begin, free) + offered.host / bandwidth
            behind = next((i for i, (_, over) in enumerate(spans) if i > place and over >= done), None)
            if behind is not None:
                free, room = done, None if room is None else room - offered.host
                hidden = {"choice": Offload(window=behind - place), "seconds": NEARLY_FREE * offered.seconds}
                rest = [option for option in unit.options if option is not offered]
                unit = UnitOptions(name=unit.name, options=(*rest, offered.model_copy(update=hidden)))
        found.append(unit)
    return problem.model_copy(update={"units": tuple(found)})
