"""Options of partial recomputation that are worth trying: which outputs of a unit to keep (a Pareto front).

The seconds that keeping an output saves and the bytes that it costs hardly depend on what else is kept. So the front
consists of nested sets, which grow by the output with the most seconds per byte. Their real costs come from ghost runs,
as for every choice. With ``remake``, which recomputes single tensors, few sets of ``selective`` are tried.

At the other end of the front little memory has to be freed. There all matrix products are kept, and only the parts of a
unit are recomputed whose cheap ops free the most bytes per second (an MLP's activation function, norms).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autockpt.schema import Graph, Op, OpTimes, Unit
from autockpt.schema.choices import ATTENTION, EVERYTHING, Remake, Selective

T = TypeVar("T")
MOST_SETS = 7
FEWER_SETS = 3  # with ``remake``, which needs as little memory and recomputes less
MOST_REMADE = 9
MOST_PARTS = 3
_PACKING = "aten.detach.default"  # of saved tensors that are packed, so not in every forward


def selective_front(recomputed: Graph, unit: Unit, times: OpTimes, most: int = MOST_SETS) -> tuple[Selective, ...]:
    """Options for one unit, from keeping a single output to all that save time; at most ``most``.

    Then options in which only parts of the unit are recomputed, at most ``MOST_PARTS``. ``recomputed`` is a ghost run
    in which ``unit`` recomputes. Fused attention alone is left out: that is the choice ``keep_attention``.
    """
    order = _by_worth(recomputed, unit, times)
    sets = [order[:n] for n in range(1, len(order) + 1) if order[:n] != [ATTENTION]]
    sets = spread(sets, most)
    whole = tuple(Selective(keep=tuple(names)) for names in sets)
    parts = _parts(recomputed, unit, times)[:MOST_PARTS]
    return whole + tuple(_of_parts(parts[:n]) for n in range(1, len(parts) + 1))


def remake_front(recomputed: Graph, unit: Unit, times: OpTimes) -> tuple[Remake, ...]:
    """Options for recomputing single tensors of one unit, from a few cheap ones to all.

    First all products are kept and only cheap ops of some parts are recomputed (at most ``MOST_PARTS`` options), then
    of all parts. Then ever fewer products are kept, those with the most seconds per byte last, at most ``MOST_REMADE``
    options. ``recomputed`` as for ``selective_front``.
    """
    parts = [part.name for part in _parts(recomputed, unit, times, handed_on_too=True)]
    cheap = [Remake(keep=(EVERYTHING,), within=tuple(parts[:n])) for n in range(1, min(MOST_PARTS, len(parts)) + 1)]
    order = _by_worth(recomputed, unit, times)
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
    """A module inside a unit: names of heavy ops to keep, and seconds and bytes of recomputing the rest."""

    name: str
    keep: set[str] = field(default_factory=set)
    seconds: float = 0.0
    freed: int = 0


def _of_parts(parts: list[_Part]) -> Selective:
    return Selective(keep=tuple(set().union(*(p.keep for p in parts))), within=tuple(p.name for p in parts))


def _parts(recomputed: Graph, unit: Unit, times: OpTimes, *, handed_on_too: bool = False) -> list[_Part]:
    """Parts of the unit whose cheap ops would free memory if recomputed, by bytes freed per second.

    Tensors that other parts read are not freed, as these save them anyway, unless ``handed_on_too``.
    """
    ops = [op for op in _rerun(recomputed, unit) if op.target != _PACKING]
    part_of = _part_names(ops, [u.name for u in recomputed.units if u.parent == unit.name])
    first, last = (ops[0].index, ops[-1].index) if ops else (0, 0)
    handed_on = _handed_on(recomputed, unit, part_of)
    kept = {s.id: s.bytes for s in recomputed.storages if s.birth >= first and (s.death is None or s.death > last)}
    freed = {out.storage: kept.get(out.storage, 0) for op in ops for out in op.outputs}
    for position, op in enumerate(ops):
        if position in handed_on and not handed_on_too:
            freed.update(dict.fromkeys((out.storage for out in op.outputs), 0))
    parts: dict[str, _Part] = {}
    for op in ops:
        name = _relative(part_of[op.module], unit)
        if not name:
            continue  # recomputed with all of the unit or not at all
        part = parts.setdefault(name, _Part(name))
        made = sum(freed.pop(out.storage, 0) for out in op.outputs)
        if _is_heavy(op):
            part.keep.add(ATTENTION if _is_fused(op) else _relative(op.module, unit))
        else:
            part.seconds += times.seconds.get(recomputed.signatures[op.signature], 0.0)
            part.freed += made
    worth = [part for part in parts.values() if part.freed and part.seconds > 0]
    return sorted(worth, key=lambda part: -part.freed / part.seconds)


def _handed_on(recomputed: Graph, unit: Unit, part_of: Mapping[str, str]) -> set[int]:
    """Positions of the unit's ops, in its forward, whose results another part or unit reads.

    The recomputation runs the same ops in the same order, but not to the end. So readers are found in the forward.
    """
    maker: dict[int, tuple[int, str]] = {}
    found: set[int] = set()
    position = 0
    for op in recomputed.ops:
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
    """For each op's module the part it belongs to: attention, MLP, or the module itself if it contains no other."""
    modules = {op.module for op in ops}
    around = {module: next((name for name in inner if _is_in(module, name)), "") for module in modules}
    leaves = {m for m in modules if not any(other != m and _is_in(other, m) for other in modules)}
    return {m: around[m] or (m if m in leaves else "") for m in modules}


def _rerun(recomputed: Graph, unit: Unit) -> Iterator[Op]:
    return (op for op in recomputed.ops if op.unit == unit.name and op.phase == "recompute")


def _relative(module: str, unit: Unit) -> str:
    return module.removeprefix(unit.name).lstrip(".")


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _is_fused(op: Op) -> bool:
    return "attention" in op.target


def _is_heavy(op: Op) -> bool:
    return bool(op.flops) or _is_fused(op)


def _by_worth(recomputed: Graph, unit: Unit, times: OpTimes) -> list[str]:
    """Modules of the unit by the seconds that keeping their outputs saves per byte, without those that save none."""
    sizes = {s.id: s.bytes for s in recomputed.storages}
    seconds: dict[str, float] = {}
    kept: dict[str, dict[int, int]] = {}
    for op in _rerun(recomputed, unit):
        if not _is_heavy(op):
            continue
        name = ATTENTION if _is_fused(op) else _relative(op.module, unit)
        if not name:
            continue  # an op of the unit itself: there is no module to name
        seconds[name] = seconds.get(name, 0.0) + times.seconds.get(recomputed.signatures[op.signature], 0.0)
        kept.setdefault(name, {}).update({out.storage: sizes[out.storage] for out in op.outputs})
    worth = {name: seconds[name] / max(1, sum(kept[name].values())) for name in seconds if seconds[name] > 0}
    return sorted(worth, key=lambda name: -worth[name])
