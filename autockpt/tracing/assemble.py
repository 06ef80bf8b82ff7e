"""From a recording to the schema's Graph, in two steps: plain data that can cross processes, then the Graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autockpt.schema.graph import PHASES, Copy, Graph, Op, Storage, StorageKind, TensorMeta, Unit
from autockpt.schema.names import strip_prefixes
from autockpt.tracing.location import OPTIMIZER
from autockpt.tracing.recorder import KindOfCall, Recorder
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
    kinds = _Kinds(recorder, workload, places)
    calls: dict[KindOfCall, int] = {}
    texts: dict[str, int] = {}
    ops = []
    for op in recorder.ops:
        number = calls.setdefault(op.call, len(calls))
        ops.append((number, op.phase, op.module, op.inputs, op.offsets, [tuple(output) for output in op.outputs]))
    table = [(call.operator.name, texts.setdefault(call.text, len(texts)), call.flops) for call in calls]
    return RawGraph(
        source=source,
        signatures=list(texts),
        resident=kinds.resident(),
        calls=table,
        places=places,
        ops=ops,
        storages=kinds.storages(places),
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


class _Kinds:
    """What each storage of a recording holds, and whose it is."""

    def __init__(self, recorder: Recorder, workload: Step, places: Sequence[Place]) -> None:
        self._recorder = recorder
        log = recorder.log
        self._owner: dict[int, str | None] = {}
        weights = self._parameters(workload, places)
        self._weights = frozenset(weights)
        self._born = dict(recorder.placed)  # in which module
        self.kind: list[StorageKind] = ["other" if birth < 0 else "activation" for birth in log.birth]
        for index, op in enumerate(recorder.ops):
            copies_weight = op.call.operator.base in _WEIGHT_COPIES and weights.issuperset(op.inputs)
            for _, storage, _ in op.outputs:
                if log.birth[storage] == index:
                    self._born[storage] = op.module
                    if copies_weight:
                        self.kind[storage] = "other"
                        weights.add(storage)
                    elif op.phase == OPTIMIZER:
                        self.kind[storage] = "optimizer"
        for sid in self._weights:
            self.kind[sid] = "weight"
        for sid in recorder.gradients:
            if log.birth[sid] >= 0:
                self.kind[sid] = "gradient"
        if workload.optimizer is not None:
            for sid in self._found(nested_tensors(workload.optimizer.state)):
                if sid not in weights:
                    self.kind[sid] = "optimizer"

    def resident(self) -> dict[str, int]:
        """Bytes that are there when the cycle begins, by what they are."""
        log = self._recorder.log
        parts = {"weights": 0, "optimizer states": 0, "buffers and batch": 0}
        for sid, (nbytes, birth) in enumerate(zip(log.bytes, log.birth, strict=True)):
            if birth < 0:
                states = "optimizer states" if self.kind[sid] == "optimizer" else "buffers and batch"
                parts["weights" if sid in self._weights else states] += nbytes
        return parts

    def storages(self, places: Sequence[Place]) -> list[tuple[Any, ...]]:
        """(id, bytes, birth, death, kind, unit) of every storage, and of what kernels take while they run."""
        recorder, log = self._recorder, self._recorder.log
        rows: list[tuple[Any, ...]] = []
        for sid, (nbytes, birth, death) in enumerate(zip(log.bytes, log.birth, log.death, strict=True)):
            module = self._born.get(sid)
            unit = self._owner.get(sid) if module is None else places[module][1]
            rows.append((sid, nbytes, birth, death, self.kind[sid], unit))
        for index, op in enumerate(recorder.ops):
            if op.call.workspace:
                rows.append((len(rows), op.call.workspace, index, index, "other", places[op.module][1]))
        return rows

    def _parameters(self, workload: Step, places: Sequence[Place]) -> set[int]:
        units = dict(places)
        weights = set()
        for path, module in workload.model.named_modules():
            own = [p for p in module._parameters.values() if p is not None]
            for sid in self._found(nested_tensors(*own) if any(map(is_traceable_wrapper_subclass, own)) else own):
                weights.add(sid)
                self._owner.setdefault(sid, units.get(strip_prefixes(path)))
        return weights

    def _found(self, tensors: Any) -> list[int]:
        log = self._recorder.log
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
