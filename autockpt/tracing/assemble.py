"""From a recording to the schema's Graph, in two steps: plain data that can cross processes, then the Graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autockpt.schema.graph import PHASES, Copy, Graph, Op, Storage, StorageKind, TensorMeta, Unit
from autockpt.schema.names import strip_prefixes
from autockpt.tracing.location import OPTIMIZER
from autockpt.tracing.recorder import KindOfCall, Recorder
from autockpt.tracing.storages import StorageLog
from autockpt.workload import Step
from autockpt.workload.storages import nested_tensors

_WEIGHT_COPIES = frozenset({"_to_copy"})
Source = Literal["ghost", "recorded"]
Place = tuple[str, str | None]


@dataclass
class RawGraph:
    """A recording as tuples of plain values. ``calls``: (target, signature, FLOPs); ``places``: (module path, unit)."""

    source: Source
    resident: dict[str, int]
    signatures: list[str]
    calls: list[tuple[str, int, int]]
    places: list[Place]
    ops: list[tuple[Any, ...]]
    storages: list[tuple[Any, ...]]
    copies: list[tuple[Any, ...]]
    repeated: int = 0
    begins: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)


def summarize(recorder: Recorder, workload: Step, places: list[Place], source: Source) -> RawGraph:
    """What a recorder has recorded of one cycle of ``workload``, as plain data; for ``places`` see RawGraph."""
    log = recorder.log
    owners = _owners(log, workload, places)
    kinds, born = _kinds(recorder, workload, owners)
    resident = {"weights": 0, "optimizer states": 0, "buffers and batch": 0}
    storages: list[tuple[Any, ...]] = []
    for sid, (nbytes, birth, death, kind) in enumerate(zip(log.bytes, log.birth, log.death, kinds, strict=True)):
        if birth < 0:
            states = "optimizer states" if kind == "optimizer" else "buffers and batch"
            resident["weights" if sid in owners else states] += nbytes
        unit = places[born[sid]][1] if sid in born else owners.get(sid)
        storages.append((sid, nbytes, birth, death, kind, unit))
    calls: dict[KindOfCall, int] = {}
    texts: dict[str, int] = {}
    ops = []
    for op in recorder.ops:
        number = calls.setdefault(op.call, len(calls))
        ops.append((number, op.phase, op.module, op.inputs, op.offsets, [tuple(output) for output in op.outputs]))
        if nbytes := op.call.workspace:
            storages.append((len(storages), nbytes, len(ops) - 1, len(ops) - 1, "other", places[op.module][1]))
    table = [(call.operator.name, texts.setdefault(call.text, len(texts)), call.flops) for call in calls]
    return RawGraph(
        source=source,
        signatures=list(texts),
        resident=resident,
        calls=table,
        places=places,
        ops=ops,
        storages=storages,
        copies=[
            (c.direction, c.nbytes, c.issued, c.awaited, places[c.module][1], c.tier, c.released)
            for c in recorder.copies
        ],
        repeated=workload.left_out,
        begins=tuple(recorder.begins),
        notes=list(recorder.notes),
    )


def to_graph(raw: RawGraph, units: tuple[Unit, ...], notes: Sequence[str] = ()) -> Graph:
    """The Graph of a recording. The data comes from the recorder, so nothing is validated again."""
    metas: dict[tuple[Any, ...], TensorMeta] = {}
    ops = []
    for index, (number, phase, module, inputs, offsets, outputs) in enumerate(raw.ops):
        target, text, flops = raw.calls[number]
        path, unit = raw.places[module]
        results = []
        for output in outputs:
            meta = metas.get(output)
            if meta is None:
                (shape, stride, dtype), storage, offset = output
                meta = metas[output] = _bare(
                    TensorMeta, shape=shape, stride=stride, dtype=dtype, storage=storage, offset=offset
                )
            results.append(meta)
        ops.append(
            _bare(
                Op,
                index=index,
                target=target,
                phase=PHASES[phase],
                module=path,
                unit=unit,
                signature=text,
                flops=flops,
                inputs=inputs,
                offsets=offsets,
                outputs=tuple(results),
            )
        )
    storages = tuple(
        _bare(Storage, id=sid, bytes=nbytes, birth=birth, death=death, kind=kind, unit=unit)
        for sid, nbytes, birth, death, kind, unit in raw.storages
    )
    fields = ("direction", "bytes", "issued", "awaited", "unit", "tier", "released")
    copies = tuple(_bare(Copy, **dict(zip(fields, values, strict=True))) for values in raw.copies)
    return Graph.model_construct(
        source=raw.source,
        resident_bytes=sum(raw.resident.values()),
        resident=raw.resident,
        signatures=tuple(raw.signatures),
        ops=tuple(ops),
        storages=storages,
        copies=copies,
        repeated=raw.repeated,
        begins=raw.begins,
        units=units,
        notes=(*notes, *raw.notes),
    )


def _owners(log: StorageLog, workload: Step, places: Sequence[Place]) -> dict[int, str | None]:
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
    """What each storage of a recording holds, and the module in which it was born."""
    log, weights, born = recorder.log, set(owners), dict(recorder.placed)
    kinds: list[StorageKind] = ["other" if birth < 0 else "activation" for birth in log.birth]
    for index, op in enumerate(recorder.ops):
        copies_weight = op.call.operator.base in _WEIGHT_COPIES and weights.issuperset(op.inputs)
        for _, storage, _ in op.outputs:
            if log.birth[storage] == index:
                born[storage] = op.module
                if copies_weight:
                    kinds[storage] = "other"
                    weights.add(storage)
                elif op.phase == OPTIMIZER:
                    kinds[storage] = "optimizer"
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


_fields_set: dict[Any, set[str]] = {}  # one for all records of a class: there are hundreds of thousands
_DICT, _SET, _EXTRA, _PRIVATE = (
    BaseModel.__dict__[f"__{name}__"].__set__
    for name in ("dict", "pydantic_fields_set", "pydantic_extra", "pydantic_private")
)


def _bare(cls: Any, **fields: Any) -> Any:
    """A frozen record without validation, several times faster than ``model_construct``; all fields must be given."""
    record = object.__new__(cls)
    _DICT(record, fields)
    _SET(record, _fields_set.get(cls) or _fields_set.setdefault(cls, set(fields)))
    _EXTRA(record, None)
    _PRIVATE(record, None)
    return record
