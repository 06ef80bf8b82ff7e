"""Assemble a Graph from a recording. The data comes from the recorder, so nothing is validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autockpt.schema.graph import PHASES, Graph, Op, Storage, StorageKind, Unit
from autockpt.schema.names import strip_prefixes
from autockpt.tracing.location import OPTIMIZER
from autockpt.tracing.recorder import Recorder
from autockpt.tracing.storages import StorageLog
from autockpt.workload import Step
from autockpt.workload.storages import nested_tensors

_WEIGHT_COPIES = frozenset({"_to_copy"})
GraphSource = Literal["ghost", "recorded"]
ModuleUnit = tuple[str, str | None]
"""A module's path, and the unit that contains it."""


def to_graph(
    recorder: Recorder, workload: Step, places: Sequence[ModuleUnit], source: GraphSource, units: tuple[Unit, ...] = ()
) -> Graph:
    """The recorded cycle of ``workload`` as a Graph; ``places`` are the modules of the recorder's location."""
    log = recorder.log
    owners = _owners(log, workload, places)
    kinds, born = _kinds(recorder, workload, owners)
    resident = {"weights": 0, "optimizer states": 0, "buffers and batch": 0}
    storages: list[Storage] = []
    for sid, (nbytes, birth, death, kind) in enumerate(zip(log.bytes, log.birth, log.death, kinds, strict=True)):
        if birth < 0:
            states = "optimizer states" if kind == "optimizer" else "buffers and batch"
            resident["weights" if sid in owners else states] += nbytes
        unit = places[born[sid]][1] if sid in born else owners.get(sid)
        storages.append(Storage(sid, nbytes, birth, death, kind, unit))
    texts: dict[str, int] = {}
    work: list[Any] = []
    ops: list[Op] = []
    for index, op in enumerate(recorder.ops):
        call, (path, unit) = op.call, places[op.module]
        if (number := texts.setdefault(call.text, len(texts))) == len(work):
            work.append(call.work)
        target, phase = call.operator.name, PHASES[op.phase]
        ops.append(Op(index, target, phase, path, number, unit, call.flops, op.inputs, op.outputs))
        if nbytes := call.workspace:
            storages.append(Storage(len(storages), nbytes, index, index, "other", unit))
    return Graph.model_construct(
        source=source,
        resident_bytes=sum(resident.values()),
        resident=resident,
        signatures=tuple(texts),
        work=tuple(work),
        ops=tuple(ops),
        storages=tuple(storages),
        copies=tuple(replace(copy, unit=places[module][1]) for module, copy in recorder.copies),
        repeated=workload.left_out,
        begins=tuple(recorder.begins),
        units=units,
        notes=tuple(recorder.notes),
    )


def _owners(log: StorageLog, workload: Step, places: Sequence[ModuleUnit]) -> dict[int, str | None]:
    """The unit of every weight, by storage."""
    units = dict(places)
    owners: dict[int, str | None] = {}
    for path, module in workload.model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        for sid in _found(log, nested_tensors(*own) if any(map(is_traceable_wrapper_subclass, own)) else own):
            owners.setdefault(sid, units.get(strip_prefixes(path)))
    return owners


def _kinds(
    recorder: Recorder, workload: Step, owners: Mapping[int, str | None]
) -> tuple[list[StorageKind], dict[int, int]]:
    """The kind of each recorded storage, and the module that made it."""
    log, weights, born = recorder.log, set(owners), dict(recorder.placed)
    kinds: list[StorageKind] = ["other" if birth < 0 else "activation" for birth in log.birth]
    for index, op in enumerate(recorder.ops):
        copies_weight = op.call.operator.base in _WEIGHT_COPIES and weights.issuperset(op.inputs)
        for output in op.outputs:
            if log.birth[sid := output.storage] == index:
                born[sid] = op.module
                if copies_weight:
                    kinds[sid] = "other"
                    weights.add(sid)
                elif op.phase == OPTIMIZER:
                    kinds[sid] = "optimizer"
    for sid in owners:
        kinds[sid] = "weight"
    for sid in recorder.gradients:
        if log.birth[sid] >= 0:
            kinds[sid] = "gradient"
    if workload.optimizer is not None:
        for sid in _found(log, nested_tensors(workload.optimizer.state)):
            if sid not in weights:
                kinds[sid] = "optimizer"
    return kinds, born


def _found(log: StorageLog, tensors: Iterable[Any]) -> list[int]:
    sids = [log.find(t) for t in tensors if isinstance(t, Tensor) and not t.is_sparse]
    return [sid for sid in sids if sid is not None]
