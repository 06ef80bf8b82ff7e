"""Which outputs of a unit are worth keeping when the rest of it runs again: nested sets, the best bargain first.

What keeping an output saves (the seconds of its op in the second forward) and what it costs (its bytes) hardly depend
on what else is kept, so the sets of the Pareto front are those that grow by seconds per byte; what they really cost is
read off ghost runs afterwards, as for every choice.

Where single tensors can be recomputed (``remake``), running a unit as a whole gains nothing: few such sets are tried.

At the other end of the front little is to be given up. There only those parts of a unit run again whose cheap ops free
the most bytes per second (an MLP's activation function, norms), and all of its matrix products are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autockpt.schema import Graph, Op, OpTimes, Unit
from autockpt.schema.choices import ATTENTION, EVERYTHING, Remake, Selective

T = TypeVar("T")
MOST_SETS = 7
MOST_SETS_BESIDE = 3  # where single tensors can be recomputed, which is as lean and runs less
MOST_REMADE = 9
MOST_PARTS = 3
_PACKING = "aten.detach.default"  # only where saved tensors are packed, so not in both forwards


def selective_front(again: Graph, unit: Unit, times: OpTimes, most: int = MOST_SETS) -> tuple[Selective, ...]:
    """Choices for one unit, from keeping a single output to all that are worth anything; at most ``most``.

    Then those in which only parts of the unit run again, at most ``MOST_PARTS``. ``again`` is a ghost run in which
    ``unit`` is recomputed. Fused attention alone is left out: that is the choice ``keep_attention``.
    """
    order = _by_worth(again, unit, times)
    sets = [order[:n] for n in range(1, len(order) + 1) if order[:n] != [ATTENTION]]
    sets = spread(sets, most)
    whole = tuple(Selective(keep=tuple(names)) for names in sets)
    parts = _parts(again, unit, times)[:MOST_PARTS]
    return whole + tuple(_of_parts(parts[:n]) for n in range(1, len(parts) + 1))


def remake_front(again: Graph, unit: Unit, times: OpTimes) -> tuple[Remake, ...]:
    """Choices by which single tensors of one unit are recomputed, from few cheap ones to all.

    First those in which all products are kept and only cheap ops of some parts run again, at most ``MOST_PARTS``, then
    of all parts. Then ever fewer products are kept, the best bargain longest; ``MOST_REMADE`` such sets at most, down
    to none. ``again`` as for ``selective_front``.
    """
    parts = [part.name for part in _parts(again, unit, times, handed_on_too=True)]
    cheap = [Remake(keep=(EVERYTHING,), within=tuple(parts[:n])) for n in range(1, min(MOST_PARTS, len(parts)) + 1)]
    order = _by_worth(again, unit, times)
    fewer = [Remake(keep=tuple(order[:n])) for n in spread(range(len(order) - 1, -1, -1), MOST_REMADE)]
    return tuple(dict.fromkeys([*cheap, Remake(keep=(EVERYTHING,)), *fewer]))


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]


@dataclass
class _Part:
    """A module inside a unit: its heavy ops by the names to keep them by, and what running the rest again means."""

    name: str
    keep: set[str] = field(default_factory=set)
    seconds: float = 0.0
    freed: int = 0


def _of_parts(parts: list[_Part]) -> Selective:
    return Selective(keep=tuple(set().union(*(p.keep for p in parts))), within=tuple(p.name for p in parts))


def _parts(again: Graph, unit: Unit, times: OpTimes, *, handed_on_too: bool = False) -> list[_Part]:
    """Parts of the unit in which only cheap ops would run again and free something, by bytes freed per second.

    Freed is what nobody outside the part reads, as what it hands on is saved there anyway; or all that it makes.
    """
    ops = [op for op in _rerun(again, unit) if op.target != _PACKING]
    part_of = _part_names(ops, [u.name for u in again.units if u.parent == unit.name])
    first, last = (ops[0].index, ops[-1].index) if ops else (0, 0)
    handed_on = _handed_on(again, unit, part_of)
    kept = {s.id: s.bytes for s in again.storages if s.birth >= first and (s.death is None or s.death > last)}
    freed = {out.storage: kept.get(out.storage, 0) for op in ops for out in op.outputs}
    for position, op in enumerate(ops):
        if position in handed_on and not handed_on_too:
            freed.update(dict.fromkeys((out.storage for out in op.outputs), 0))
    parts: dict[str, _Part] = {}
    for op in ops:
        name = _relative(part_of[op.module], unit)
        if not name:
            continue  # runs again with all of the unit or not at all
        part = parts.setdefault(name, _Part(name))
        made = sum(freed.pop(out.storage, 0) for out in op.outputs)
        if _is_heavy(op):
            part.keep.add(ATTENTION if _is_fused(op) else _relative(op.module, unit))
        else:
            part.seconds += times.seconds.get(again.signatures[op.signature], 0.0)
            part.freed += made
    worth = [part for part in parts.values() if part.freed and part.seconds > 0]
    return sorted(worth, key=lambda part: -part.freed / part.seconds)


def _handed_on(again: Graph, unit: Unit, part_of: Mapping[str, str]) -> set[int]:
    """Which of the unit's ops, by their order in its forward, make what another part or another unit reads.

    The second forward runs the same ops in the same order, but not to the end, so readers are looked for in the first.
    """
    maker: dict[int, tuple[int, str]] = {}
    found: set[int] = set()
    position = 0
    for op in again.ops:
        if op.phase != "forward":
            break
        if op.target == _PACKING:
            continue
        part = part_of.get(op.module, "") if op.unit == unit.name else None
        for storage in op.inputs:
            if storage in maker and maker[storage][1] != part:
                found.add(maker[storage][0])
        if part is not None:
            for out in op.outputs:
                maker.setdefault(out.storage, (position, part))  # a view makes nothing
            position += 1
    return found


def _part_names(ops: Sequence[Op], inner: Sequence[str]) -> dict[str, str]:
    """For each op's module the part it belongs to: attention, MLP, or itself where no other module is inside of it."""
    modules = {op.module for op in ops}
    around = {module: next((name for name in inner if _is_in(module, name)), "") for module in modules}
    leaves = {m for m in modules if not any(other != m and _is_in(other, m) for other in modules)}
    return {m: around[m] or (m if m in leaves else "") for m in modules}


def _rerun(again: Graph, unit: Unit) -> Iterator[Op]:
    return (op for op in again.ops if op.unit == unit.name and op.phase == "recompute")


def _relative(module: str, unit: Unit) -> str:
    return module.removeprefix(unit.name).lstrip(".")


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _is_fused(op: Op) -> bool:
    return "attention" in op.target


def _is_heavy(op: Op) -> bool:
    return bool(op.flops) or _is_fused(op)


def _by_worth(again: Graph, unit: Unit, times: OpTimes) -> list[str]:
    """Modules of the unit by the seconds that keeping their outputs saves per byte; only those that save any."""
    sizes = {s.id: s.bytes for s in again.storages}
    seconds: dict[str, float] = {}
    kept: dict[str, dict[int, int]] = {}
    for op in _rerun(again, unit):
        if not _is_heavy(op):
            continue
        name = ATTENTION if _is_fused(op) else _relative(op.module, unit)
        if not name:
            continue  # an op of the unit itself: there is no module to name
        seconds[name] = seconds.get(name, 0.0) + times.seconds.get(again.signatures[op.signature], 0.0)
        kept.setdefault(name, {}).update({out.storage: sizes[out.storage] for out in op.outputs})
    worth = {name: seconds[name] / max(1, sum(kept[name].values())) for name in seconds if seconds[name] > 0}
    return sorted(worth, key=lambda name: -worth[name])
