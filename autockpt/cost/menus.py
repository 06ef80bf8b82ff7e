"""Menus: what each choice costs on each kind of unit, measured by ghost runs. No choice needs a formula of its own.

A choice is ghost-run on one unit while all others save. Its costs are the differences to plain training, so they
include all that the choice really does. Memory shared by all units (masks, rotary tables) is excluded, or it would be
counted once per unit. Bytes of an offloaded unit that are still on their way while its neighbours run are charged to
the unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autockpt.cost.op_ranges import OpRange, op_ranges, range_peaks
from autockpt.cost.simulation import Simulation
from autockpt.schema.choices import GATHERED, RECOMPUTE, SAVE, Choice
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.profile import Menu, MenuItem
from autockpt.tracing.kernels.operators import COLLECTIVES, COPY_OUT
from autockpt.tracing.kernels.timeline import bytes_timeline

Simulate = Callable[[Graph], Simulation]


def representatives(blocks: Iterable[Unit]) -> dict[int, Unit]:
    """The unit of each kind that choices are ghost-run on: a middle one, as the first and the last are special."""
    by_kind: dict[int, list[Unit]] = {}
    for unit in blocks:
        by_kind.setdefault(unit.kind, []).append(unit)
    return {kind: units[len(units) // 2] for kind, units in by_kind.items()}


def build_menus(
    base: Graph,
    variants: Mapping[tuple[int, Choice], Graph],
    simulation: Simulate,
    host_seconds: Callable[[Choice], float] = lambda choice: 0.0,
) -> tuple[Menu, ...]:
    """The menu of every kind of unit, ``save`` first, then the choices that ``variants`` hold.

    ``base`` is the ghost run with every unit on save; ``variants[kind, choice]`` the one with ``choice`` on the kind's
    representative alone; ``simulation`` gives a graph's seconds on the device, ``host_seconds`` what a choice costs the
    host besides its ops. Bytes are peaks over all micro-batches.
    """
    plain = _GhostStep(base, [u.name for u in base.blocks()], simulation)
    menus = []
    for kind, unit in representatives(base.blocks()).items():

        def seconds(choice: Choice, run: _GhostStep, name: str = unit.name) -> dict[str, Any]:
            times = run.simulation.seconds_by_unit[name]
            found = {f"{phase}_seconds": times[phase] for phase in ("forward", "backward", "recompute")}
            copies = _copy_seconds(plain.simulation, run.simulation, times)
            return found | {"copy_seconds": copies, "host_seconds": host_seconds(choice)}

        of_kind = {choice: graph for (of, choice), graph in variants.items() if of == kind}
        menus.append(_menu(plain, unit, of_kind, simulation, seconds))
    return tuple(menus)


def overlapping_collectives(
    menus: tuple[Menu, ...], base: Graph, recomputed: Graph, simulation: Simulate
) -> tuple[Menu, ...]:
    """The menus of a sharded step, in which collectives overlap recomputation.

    A single unit that recomputes gains the most from that overlap, so menus would be too cheap. The cost of recomputing
    is scaled so that the menus add up to the step in which all units recompute, ``recomputed``.
    """
    sends = any(copy.direction == "ranks" for copy in base.copies)
    if not sends and not any(text.startswith(COLLECTIVES) for text in base.signatures):
        return menus
    by_kind = {menu.kind: {item.choice: item for item in menu.items} for menu in menus}
    pairs = [(by_kind[unit.kind][SAVE], by_kind[unit.kind][RECOMPUTE]) for unit in base.blocks()]
    alone = sum(again.seconds - plain.seconds for plain, again in pairs)
    whole = simulation(recomputed).step_seconds - simulation(base).step_seconds
    share = max(0.0, 1 - max(0.0, alone - whole) / (sum(again.recompute_seconds for _, again in pairs) or 1.0))
    shared = [
        [item.model_copy(update={"recompute_seconds": share * item.recompute_seconds}) for item in menu.items]
        for menu in menus
    ]
    return tuple(menu.model_copy(update={"items": tuple(items)}) for menu, items in zip(menus, shared, strict=True))


def gathered_again(base: Graph) -> set[str]:
    """Units whose weights FSDP2 frees after their forward and gathers again for their backward."""
    return {op.unit for op in base.ops if op.target == COPY_OUT and op.phase == "backward" and op.unit is not None}


def with_gathered(menus: tuple[Menu, ...], base: Graph, gathered: Graph, simulation: Simulate) -> tuple[Menu, ...]:
    """The menus with a second version of every choice, by which FSDP2 keeps the unit's weights until its backward.

    It needs as many more bytes as it does with saving. The seconds gained if all units do so, as in ``gathered``, are
    shared among the units by these bytes: the gain of a single unit depends on whether its gathering is hidden.
    """
    by_kind = {menu.kind: {item.choice: item for item in menu.items} for menu in menus}
    offered = [items for unit in base.blocks() if GATHERED in (items := by_kind[unit.kind])]
    whole = sum(items[GATHERED].kept_bytes - items[SAVE].kept_bytes for items in offered)
    per_byte = (simulation(gathered).step_seconds - simulation(base).step_seconds) / max(1, whole)
    return tuple(_twice(menu, per_byte) if GATHERED in by_kind[menu.kind] else menu for menu in menus)


def _twice(menu: Menu, seconds_per_byte: float) -> Menu:
    plain = menu.items[0]
    one = next(item for item in menu.items if item.choice == GATHERED)
    more = {name: getattr(one, name) - getattr(plain, name) for name in _Bytes._fields}
    more["backward_seconds"] = seconds_per_byte * more["kept_bytes"]
    items = [item for item in menu.items if item is not one]
    for item in tuple(items):
        changed: dict[str, Any] = {name: getattr(item, name) + change for name, change in more.items()}
        changed["choice"] = item.choice.model_copy(update={"gathered": True})
        items.append(item.model_copy(update=changed))
    return menu.model_copy(update={"items": tuple(items)})


def head_menu(base: Graph, head: Unit, variants: Mapping[Choice, Graph], simulation: Simulate) -> Menu:
    """The menu of the output head, ``save`` first; ``variants`` are ghost runs with a choice on it alone.

    Its chunks run inside of the loss, not inside of its module, so its seconds are what the whole step gains or loses.
    """
    plain = _GhostStep(base, [*(u.name for u in base.blocks()), head.name], simulation)

    def seconds(choice: Choice, run: _GhostStep) -> dict[str, Any]:
        more = run.simulation.step_seconds - plain.simulation.step_seconds
        return {"forward_seconds": 0.0, "backward_seconds": more, "recompute_seconds": 0.0}

    return _menu(plain, head, variants, simulation, seconds)


def _menu(
    plain: _GhostStep,
    unit: Unit,
    variants: Mapping[Choice, Graph],
    simulation: Simulate,
    seconds: Callable[[Choice, _GhostStep], dict[str, Any]],
) -> Menu:
    """The menu of a unit from its ghost runs: the bytes of saving plus the difference of each choice."""
    index = plain.units.index(unit.name)
    others = ((choice, _GhostStep(graph, plain.units, simulation)) for choice, graph in variants.items())
    items = [
        MenuItem(
            choice=choice,
            **_byte_changes(plain, run, index, shares=choice != GATHERED)._asdict(),
            **seconds(choice, run),
            host_bytes=max(0, run.host_bytes - plain.host_bytes),
        )
        for choice, run in ((SAVE, plain), *others)
    ]
    levels = _saved_levels(plain, index, unit.name)
    return Menu(kind=unit.kind, representative=unit.name, items=_lifted(items, levels))


class _Bytes(NamedTuple):
    """Bytes that a choice holds, or its difference to saving, by the names of ``MenuItem``."""

    kept_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


class _GhostStep:
    """A ghost-run step with its simulation, and its peak in each of its op ranges."""

    def __init__(self, graph: Graph, units: Sequence[str], simulation: Simulate) -> None:
        self.graph, self.units, self.simulation = graph, units, simulation(graph)
        self.ranges = op_ranges(graph, units)
        self.peaks = {r.key: peak for r, peak in zip(self.ranges, range_peaks(graph, self.ranges), strict=True)}

    def matching(self, plain: _GhostStep) -> dict[tuple, OpRange]:
        """For each range of the ``plain`` step, by its key, this step's own; where it lacks one, the one before."""
        own, match, found = {r.key: r for r in self.ranges}, self.ranges[0], dict[tuple, OpRange]()
        for r in plain.ranges:
            found[r.key] = match = own.get(r.key, match)
        return found

    def foreign_bytes(self, op_range: OpRange, mine: set[str]) -> int:
        """Bytes of activations that were made outside the units ``mine`` and are alive at the peak of a range."""
        at = op_range.first + int(np.argmax(bytes_timeline(self.graph)[op_range.first : op_range.end]))
        return sum(
            s.bytes
            for s in self.graph.storages
            if s.kind == "activation" and s.unit not in mine and s.birth >= 0 and s.alive_at(at)
        )

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host at once, without those on disk."""
        end = len(self.graph.ops)
        return _most_at_once(
            (copy.issued, end if copy.released is None else copy.released, copy.bytes)
            for copy in self.graph.copies
            if copy.direction == "out" and copy.tier == "cpu"
        )


def _byte_changes(plain: _GhostStep, variant: _GhostStep, index: int, *, shares: bool) -> _Bytes:
    """Differences of bytes, the largest of any micro-batch. ``shares``: subtract what all units share."""
    found: list[_Bytes] = []
    matching = variant.matching(plain)
    # an input that only this unit keeps is its neighbour's output
    mine = set(plain.units[max(0, index - 1) : index + 1])
    # a stage of a pipeline fills up before its first backward: what a choice changes shows when it is full
    filling = plain.graph.in_flight - 1

    def change(r: OpRange) -> int:
        return variant.peaks[matching[r.key].key] - plain.peaks[r.key]

    for m in sorted({r.micro_batch for r in plain.ranges if r.micro_batch >= filling}):
        kept_at, own, neighbours = _ranges_of(plain.ranges, m, index)
        if kept_at is None:
            continue
        kept, there = change(kept_at), matching[kept_at.key]
        shared = max(0, variant.foreign_bytes(there, mine) - plain.foreign_bytes(kept_at, mine)) if shares else 0
        both = []
        for place in ("forward", "backward"):
            left_behind = sum(max(0, change(r) - kept) for r in neighbours[place])
            both.append(sum(map(change, own[place])) + left_behind)
        found.append(_Bytes(kept - shared, *both))
    return _Bytes(*map(max, zip(*found, strict=True)))


def _ranges_of(ranges: Sequence[OpRange], m: int, index: int) -> tuple[OpRange | None, dict, dict]:
    """The range that shows the kept bytes of a unit in micro-batch ``m``, the unit's ranges, and its neighbours'."""
    forwards = [r for r in ranges if r.micro_batch == m and r.part == "forward"]
    backwards = [r for r in ranges if r.micro_batch == m and r.part == "backward"]
    own_forward = next((r for r in forwards if r.unit == index), None)
    if own_forward is None:
        return None, {}, {}
    own_backward = next((r for r in backwards if r.unit == index), None)
    turn = min((r.first for r in backwards), default=ranges[-1].end)
    between = [r for r in ranges if r.micro_batch == m and own_forward.end <= r.first]
    between = [r for r in between if own_backward is None or r.end <= own_backward.first]
    # At the turn from forward to backward (head and loss) no copies are on their way; else the nearest range is taken.
    rest = min(
        between, key=lambda r: (r.end != turn, r.part in ("forward", "backward"), abs(r.end - turn)), default=None
    )
    own = {"forward": [own_forward], "backward": [own_backward] if own_backward else []}
    neighbours = {
        "forward": [r for r in forwards if r.first >= own_forward.end],
        "backward": [r for r in backwards if own_backward is not None and r.end <= own_backward.first],
    }
    return rest or own_forward, own, neighbours


def _copy_seconds(plain: Simulation, variant: Simulation, times: Mapping[str, float]) -> float:
    """Seconds that copies add to the step: as simulated, or if every unit copied as much, whichever is more.

    A single unit's copies hide behind its neighbours' compute. If all units copy, each has only its own compute.
    """
    seen = variant.copy_seconds - plain.copy_seconds
    out = variant.queue_seconds["out"] - plain.queue_seconds["out"] - times["forward"]
    back = variant.queue_seconds["in"] - plain.queue_seconds["in"] - times["backward"] - times["recompute"]
    return max(0.0, seen, max(0.0, out) + max(0.0, back))


def _lifted(items: Sequence[MenuItem], levels: _Bytes) -> tuple[MenuItem, ...]:
    """Add the bytes of saving (``levels``) to differences, so that none is negative."""
    for name, level in levels._asdict().items():
        level = max(level, *(-getattr(item, name) for item in items))
        items = [item.model_copy(update={name: level + getattr(item, name)}) for item in items]
    return tuple(items)


def _saved_levels(plain: _GhostStep, index: int, name: str) -> _Bytes:
    """Bytes of the storages of a unit that saves: kept from forward to backward, and the most during each."""
    spans = {r.part: r for r in reversed(plain.ranges) if r.unit == index and r.part in ("forward", "backward")}
    if "forward" not in spans:
        return _Bytes()
    forward, backward = spans["forward"], spans.get("backward")
    last = len(plain.graph.ops)
    needed = backward.first if backward else last
    own = [
        (s.birth, last if s.death is None else s.death, s.bytes)
        for s in plain.graph.storages
        if s.unit == name and s.birth >= 0 and s.kind == "activation"
    ]
    kept = sum(size for birth, death, size in own if forward.first <= birth < forward.end and death >= needed)
    return _Bytes(kept, _most(own, forward), _most(own, backward) if backward else 0)


def _most(own: Sequence[tuple[int, int, int]], span: OpRange) -> int:
    """The most bytes of (birth, death, bytes) that are alive at any op of a range."""
    return _most_at_once(
        (max(birth, span.first), death, size) for birth, death, size in own if birth < span.end and death >= span.first
    )


def _most_at_once(spans: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes of (first op, last op, bytes) at any op."""
    change: dict[int, int] = {}
    for first, last, size in spans:
        change[first] = change.get(first, 0) + size
        change[last + 1] = change.get(last + 1, 0) - size
    return max(itertools.accumulate(change[at] for at in sorted(change)), default=0)
