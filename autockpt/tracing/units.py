"""Units as the graph shows them: what was called, in which order, and which of them cost the same."""

from __future__ import annotations

from collections.abc import Sequence

from autockpt.schema.graph import Unit
from autockpt.tracing.recorder import Recorder


def refine(units: Sequence[Unit], recorder: Recorder) -> tuple[Unit, ...]:
    """Units of a recorded cycle: blocks in order of their first call, then sub-units in theirs.

    Units that were never called are dropped. Units of equal ``kind`` had equal structure before and also ran the same
    ops with the same signatures, in the same order, in every phase.
    """
    paths = recorder.location.paths
    called = {paths[number]: place for place, number in enumerate(recorder.location.order)}
    alive = [u for u in units if u.name in called and (u.parent is None or u.parent in called)]
    alive.sort(key=lambda u: (u.role != "block", called[u.parent or u.name], called[u.name]))
    behaviour = _behaviour(alive, recorder)
    kinds: dict[tuple[object, ...], int] = {}
    refined = []
    for unit in alive:
        kind = kinds.setdefault((unit.kind, behaviour[unit.name]), len(kinds))
        refined.append(unit.model_copy(update={"kind": kind}))
    return tuple(refined)


def unit_of(path: str, units: Sequence[Unit]) -> str | None:
    """The block that a module path lies in."""
    inside = [u.name for u in units if u.role == "block" and (path == u.name or path.startswith(u.name + "."))]
    return max(inside, key=len, default=None)


def _behaviour(units: Sequence[Unit], recorder: Recorder) -> dict[str, tuple[object, ...]]:
    """What each unit ran: (phase, signature) of its ops, in order."""
    inside = [_enclosing(path, units) for path in recorder.location.paths]
    ran: dict[str, list[object]] = {unit.name: [] for unit in units}
    for op in recorder.ops:
        for name in inside[op.module]:
            ran[name].append((op.phase, op.call.text))
    return {name: tuple(ops) for name, ops in ran.items()}


def _enclosing(path: str, units: Sequence[Unit]) -> list[str]:
    """Names of the units that a module path lies in."""
    return [u.name for u in units if path == u.name or path.startswith(u.name + ".")]
