"""Profile a deep model of equal blocks on a shallow twin, which is much faster to ghost-run.

A choice costs the same in each block, so menus come from the twin. Peaks and step times of plans still come from ghost
runs of the whole model.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from autockpt.cost import CostModel, MemoryModel, Predictor
from autockpt.cost.menus import representatives
from autockpt.cost.profile import segments_of
from autockpt.errors import AutockptError
from autockpt.schema import RECOMPUTE, Graph, Hardware, Listener, Silence, Unit, WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload.configs import shallow_twin

DEEP = 16  # blocks from which on a twin saves time
TWIN_BLOCKS = 4  # of each stack, more where it has more types of blocks


def open_twin(stack: ExitStack, spec: WorkloadSpec, tracer: Tracer, hardware: Hardware) -> tuple[Tracer, Graph] | None:
    """A tracer of the shallow twin, kept open by ``stack``, and the whole model's ghost run with every unit on save.

    None where the model has no such twin.
    """
    blocks = [unit for unit in tracer.units if unit.role == "block"]
    if len(blocks) < DEEP or spec.stage is not None:
        return None
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="autockpt-")))
    twin = shallow_twin(spec, tracer.settings, TWIN_BLOCKS, folder)
    if twin is None:
        return None
    try:
        small = stack.enter_context(Tracer.from_spec(twin, hardware=hardware, fallback=False, similar=tracer))
        base, alike = tracer.trace(), small.trace()
    except AutockptError:
        return None
    if base.source != "ghost" or len(alike.blocks()) >= len(blocks) or _matching(alike, base) is None:
        return None
    return small, base


def transplanted(
    small: CostModel, base: Graph, tracer: Tracer, memory: MemoryModel | None = None, listener: Listener = Silence()
) -> CostModel:
    """The profile of the whole model, whose ghost run is ``base``, with the menus of its shallow twin.

    ``memory`` says what a ghost run of the whole model takes of the device.
    """
    listener.stage("ghost-run the whole model, recomputed")
    times = small.profile.op_times
    predictor = Predictor(tracer, times, small.host_budget, memory)
    predictor.learn({}, base)
    by_kind = {menu.kind: menu for menu in small.profile.menus}
    twins = _matching(small.base, base) or {}
    menus = tuple(
        by_kind[twins[kind]].model_copy(update={"kind": kind, "representative": unit.name})
        for kind, unit in representatives(base.blocks()).items()
    )
    offered = {menu.kind: [item.choice for item in menu.items] for menu in menus}
    lean = {
        unit.name: RECOMPUTE if RECOMPUTE in offered[unit.kind] else offered[unit.kind][-1] for unit in base.blocks()
    }
    if small.head is not None:
        menus = (*menus, small.profile.menus[-1].model_copy(update={"kind": 1 + max(menu.kind for menu in menus)}))
    profile = small.profile.model_copy(
        update={
            "menus": menus,
            "save_all_peak_bytes": base.peak_bytes,
            "save_all_seconds": predictor.simulation(base).step_seconds,
        }
    )
    segments = segments_of(base, menus) if small.segments else {}
    cost_model = CostModel(profile, base, predictor, small.used_by_others, segments)
    cost_model.check(lean)
    return cost_model


def _matching(small: Graph, whole: Graph) -> dict[int, int] | None:
    """For each kind of block of the whole model the equivalent kind of the twin; None where one has no equivalent.

    With adapters the first block is a kind of its own, as nothing before it needs gradients.
    """
    known = {kind: _inside(small, unit) for kind, unit in representatives(small.blocks()).items()}
    found: dict[int, int] = {}
    for kind, unit in representatives(whole.blocks()).items():
        inside = _inside(whole, unit)
        match = next((other for other, theirs in known.items() if theirs == inside), None)
        if match is None:
            return None
        found[kind] = match
    return found


def _inside(graph: Graph, unit: Unit) -> tuple[str, list[tuple[str, str]], list[tuple[str, int]]]:
    """The ops and storages of a block, comparable between two models."""
    ops = [(op.phase, graph.signatures[op.signature]) for op in graph.ops if op.unit == unit.name]
    return unit.cls, ops, sorted((s.kind, s.bytes) for s in graph.storages if s.unit == unit.name)
