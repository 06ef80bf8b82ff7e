"""Which outputs of a unit are worth keeping when the rest of it runs again: nested sets, the best bargain first.

What keeping an output saves (the seconds of its op in the second forward) and what it costs (its bytes) hardly depend
on what else is kept, so the sets of the Pareto front are those that grow by seconds per byte; what they really cost is
read off ghost runs afterwards, as for every choice.
"""

from __future__ import annotations

from autockpt.schema import Graph, OpTimes, Unit
from autockpt.schema.choices import ATTENTION, Selective

MOST_SETS = 7


def selective_front(again: Graph, unit: Unit, times: OpTimes) -> tuple[Selective, ...]:
    """Choices for one unit, from keeping a single output to all that are worth anything; at most ``MOST_SETS``.

    ``again`` is a ghost run in which ``unit`` is recomputed. Fused attention alone is left out: that is the choice
    ``keep_attention``.
    """
    order = _by_worth(again, unit, times)
    sets = [order[:n] for n in range(1, len(order) + 1) if order[:n] != [ATTENTION]]
    if len(sets) > MOST_SETS:
        step = (len(sets) - 1) / (MOST_SETS - 1)
        sets = [sets[round(i * step)] for i in range(MOST_SETS)]
    return tuple(Selective(keep=tuple(names)) for names in sets)


def _by_worth(again: Graph, unit: Unit, times: OpTimes) -> list[str]:
    """Modules of the unit by the seconds that keeping their outputs saves per byte; only those that save any."""
    sizes = {s.id: s.bytes for s in again.storages}
    seconds: dict[str, float] = {}
    kept: dict[str, dict[int, int]] = {}
    for op in again.ops:
        fused = "attention" in op.target
        if op.unit != unit.name or op.phase != "recompute" or not (op.flops or fused):
            continue
        name = ATTENTION if fused else op.module.removeprefix(unit.name).lstrip(".")
        if not name:
            continue  # an op of the unit itself: there is no module to name
        seconds[name] = seconds.get(name, 0.0) + times.seconds.get(again.signatures[op.signature], 0.0)
        kept.setdefault(name, {}).update({out.storage: sizes[out.storage] for out in op.outputs})
    worth = {name: seconds[name] / max(1, sum(kept[name].values())) for name in seconds if seconds[name] > 0}
    return sorted(worth, key=lambda name: -worth[name])
