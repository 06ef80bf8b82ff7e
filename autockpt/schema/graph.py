"""One training step as data: every op, every storage's life, every copy, and the units that choices are made for.

A step has hundreds of thousands of ops, tensors and storages. So these are dataclasses, small and quickly made: they
are validated only where they are read from a file, and frozen for type checkers alone.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from operator import attrgetter
from typing import Any, Literal, TypeVar, dataclass_transform

from pydantic import Field

from autockpt.schema.base import Data

Tier = Literal["cpu", "disk"]
"""Where offloaded bytes lie: in host memory, or in a file."""
Phase = Literal["forward", "recompute", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")
UnitRole = Literal["block", "attention", "mlp", "head"]
StorageKind = Literal["activation", "gradient", "optimizer", "weight", "other"]
WorkKind = Literal["none", "matrix", "attention", "elements", "link"]


T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def _record(cls: type[T]) -> type[T]:
    """A dataclass that is pickled as the values of its fields: several times faster than by their names."""
    made: Any = dataclass(slots=True)(cls)
    values = attrgetter(*made.__slots__)
    copyreg.pickle(made, lambda one: (made, values(one)))
    return made


class Unit(Data):
    """A module that one choice is made for."""

    name: str = Field(description="qualified module name, wrapper prefixes stripped")
    cls: str = Field(description="class name of the module")
    kind: int = Field(description="units of equal kind have equal structure and inputs, and share one cost")
    role: UnitRole = "block"
    parent: str | None = Field(default=None, description="the enclosing unit's name, for attention and MLP sub-units")


@_record
class TensorMeta:
    """A tensor as an op returned it. ``storage`` is a Storage id; sizes in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int


@_record
class Op:
    """One call into PyTorch's dispatcher below autograd.

    ``target`` is the overload's name (``aten.mm.default``), ``module`` the qualified name of the innermost module (""
    for the root), ``unit`` the block that the op belongs to, None for the remainder; ``signature`` is an index into
    ``Graph.signatures``. ``inputs`` are ids of the storages read, one per tensor argument in the order of the call.
    """

    index: int
    target: str
    phase: Phase
    module: str
    signature: int
    unit: str | None = None
    flops: int = 0
    inputs: tuple[int, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()


@_record
class Work:
    """What an op asks of a device: FLOPs (multiply and add are two), bytes read and written, elements of the largest
    tensor.

    ``name`` is the op without namespace and overload (``tanh``), ``dtype`` that of the arithmetic as torch names it
    (``bfloat16``), ``smallest`` the smallest dimension of a product. ``unpacked``: those of the bytes that are moved
    before the product begins, to dequantise its weight. Of a collective (``link``) ``bytes`` are what a rank sends.
    ``tensors``: of an op over lists, as those of grouped optimizers, how many its first list has.
    """

    kind: WorkKind
    name: str
    dtype: str = "float32"
    flops: float = 0.0
    bytes: float = 0.0
    elements: int = 0
    smallest: int = 0
    unpacked: float = 0.0
    tensors: int = 1


@_record
class Storage:
    """A block of device memory. Alive from op ``birth`` up to and including op ``death`` (None: past the end).

    ``birth`` -1 means: alive before the recorded cycle began, and then its bytes are part of ``Graph.resident_bytes``.
    """

    id: int
    bytes: int
    birth: int
    death: int | None
    kind: StorageKind = "activation"
    unit: str | None = None

    def alive_at(self, op: int) -> bool:
        """Whether it is alive while an op runs."""
        return self.birth <= op and (self.death is None or self.death >= op)


@dataclass(slots=True)
class Copy:
    """Bytes moved off (``out``) or back onto (``in``) the device by an offload choice, or sent to other ranks by DDP.

    Issued just before op ``issued`` on the copy queue of its direction; the compute queue waits for its end just before
    op ``awaited`` (None: never). On devices without copy queues a copy takes place where it is issued. What went
    ``out`` occupies its tier until just before op ``released`` (None: past the end). Mutable, as its end is recorded
    later than its beginning.
    """

    direction: Literal["out", "in", "ranks"]
    bytes: int
    issued: int
    awaited: int | None = None
    unit: str | None = None
    tier: Tier = "cpu"
    released: int | None = None


class Span(Data):
    """A run of ops of one phase: [start, stop) in op order."""

    phase: Phase
    start: int
    stop: int


class Graph(Data):
    """One whole accumulation cycle (forward, backward, optimizer), from the second cycle on.

    ``resident_bytes`` is what is on the device when the cycle begins: parameters, buffers, optimizer states, batch.
    Ghost runs of many micro-batches stop after the second, which all further ones are like: ``repeated`` counts these.
    """

    source: Literal["ghost", "recorded"] = "ghost"
    resident_bytes: int
    resident: dict[str, int] = Field(default_factory=dict, description="its bytes by what they are: weights, …")
    signatures: tuple[str, ...]
    work: tuple[Work, ...] = Field(description="of an op of each signature")
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    copies: tuple[Copy, ...] = ()
    repeated: int = Field(default=0, description="micro-batches besides, each as the last one here")
    begins: tuple[int, ...] = Field(
        default=(), description="of a stage of a pipeline: first ops of its micro-batches' forwards and backwards"
    )
    units: tuple[Unit, ...] = Field(default=(), description="blocks in order of their first call, then sub-units")
    notes: tuple[str, ...] = Field(default=(), description="what could not be exact, for people")

    def timeline(self) -> Iterator[int]:
        """Device bytes while each op runs, in op order: resident bytes plus every storage alive at that op."""
        change = [0] * (len(self.ops) + 1)
        for s in self.storages:
            if s.birth >= 0:
                change[s.birth] += s.bytes
            if s.death is not None and s.death + 1 < len(change):
                change[s.death + 1] -= s.bytes
        change[0] += self.resident_bytes
        return accumulate(change[:-1])

    @cached_property
    def peak_bytes(self) -> int:
        """Most device bytes at any op of the cycle."""
        return max(self.timeline(), default=self.resident_bytes)

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """How often the cycle runs each op: those of the last micro-batch stand for the repeated ones, too."""
        runs = [1] * len(self.ops)
        if self.repeated:
            trained = [s for s in pairwise(self.spans()) if (s[0].phase, s[1].phase) == ("forward", "backward")]
            first, last = trained[-1]
            runs[first.start : last.stop] = [1 + self.repeated] * (last.stop - first.start)
        return tuple(runs)

    @property
    def copied(self) -> tuple[int, ...]:
        """How often the cycle makes each copy."""
        return tuple(self.runs[min(copy.issued, len(self.ops) - 1)] for copy in self.copies)

    @cached_property
    def timed(self) -> set[str]:
        """Signatures of ops that are timed one by one: all but those of the optimizer, which is timed as a whole."""
        return {self.signatures[op.signature] for op in self.ops if op.phase != "optimizer"}

    @cached_property
    def flops(self) -> int:
        """FLOPs of the whole cycle."""
        return sum(op.flops * runs for op, runs in zip(self.ops, self.runs, strict=True))

    @cached_property
    def in_flight(self) -> int:
        """Forwards before the first backward: more than one in a stage of a pipeline."""
        return sum(1 for _ in takewhile(lambda span: span.phase == "forward", self.spans()))

    def held_gradients(self) -> tuple[Storage, ...]:
        """Gradients that the optimizer step finds; those of later micro-batches are added to them and dropped."""
        last = self.ops[-1].index if self.ops else -1
        start = next((op.index for op in self.ops if op.phase == "optimizer"), last)
        return tuple(s for s in self.storages if s.kind == "gradient" and s.alive_at(start))

    def spans(self) -> tuple[Span, ...]:
        """Runs of forward, backward (recompute is part of it) and optimizer."""
        found: list[Span] = []
        begins = set(self.begins)
        for op in self.ops:
            phase: Phase = "backward" if op.phase == "recompute" else op.phase
            goes_on = found and found[-1].phase == phase and op.index not in begins
            start = found.pop().start if goes_on else op.index
            found.append(Span(phase=phase, start=start, stop=op.index + 1))
        return tuple(found)

    def blocks(self) -> tuple[Unit, ...]:
        """The units that partition the model: no sub-units."""
        return tuple(u for u in self.units if u.role == "block")
