"""One forward of a unit, noted op by op below autograd: what each storage held between two writes, and what made it.

The record is a timeline of ops, of tensors that autograd saved, and of tensors that modules inside the unit were given
or returned. ``recipes`` plans from it which saved tensors can be dropped. The recorder is no dispatch mode itself: a
mode of the caller hands it each op.

A ``Value`` stands for a storage, not for a tensor. Views of a storage are geometry, relative to the tensor by which the
storage is had. A write ends a value: the memory holds another one from then on. An op can recompute that where it can
run again, and what it wrote to can be recomputed or was blank (``empty``), as where keys are copied together.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from autockpt.checkpointing.fingerprint import PLAIN
from autockpt.checkpointing.op_table import STATISTICS, draws_random_numbers, kind_of, written_by
from autockpt.checkpointing.replay_context import current_transform, switches

_FLAGS = operator.attrgetter("enabled", "deterministic", "conv.fp32_precision")
_UNKNOWN: Any = object()  # in the place of an argument that cannot be noted

Geometry = tuple[torch.Size, tuple[int, ...], int]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether storage, geometry and dtype are all that there is to a tensor."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_complex() or tensor.is_neg() or tensor.is_inference() or tensor.is_quantized)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return tensor.size(), tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def _flags() -> Any:
    """Which kernels of cuDNN and oneDNN are allowed now."""
    return _FLAGS(torch.backends.cudnn), _FLAGS(torch.backends.mkldnn)


class Value:
    """What one storage held between two writes.

    ``given``: the unit is given it, as its input or weight of this ``number``. ``foreign``: it comes from elsewhere and
    the unit reads it: a global, an attribute of an object. Else an op made it: ``op`` where that can run again, as its
    output ``index``. ``overwritten``: the memory holds something else by the end of the forward, so it cannot be held.
    ``blank``: the op that made the memory, to be written to; ``unwritten``: how many of its elements are not yet.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.geometry, self.dtype, self.nbytes = geometry_of(tensor), tensor.dtype, tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.given: Literal["input", "weight"] | None = None
        self.op: RecordedOp | None = None
        self.blank: RecordedOp | None = None
        self.number = self.index = self.unwritten = 0
        self.foreign = self.overwritten = False

    @property
    def can_be_made(self) -> bool:
        """Whether an op can run again that leaves nothing unwritten."""
        return self.op is not None and (self.overwritten or not self.unwritten)


class Read(NamedTuple):
    """Stands for a tensor among an op's arguments."""

    value: Value
    geometry: Geometry


class RecordedOp:
    """An op that can run again. Its arguments are as they were but for tensors, which are ``Read``."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], reads: list[Value]) -> None:
        self.func, self.args, self.kwargs, self.reads = func, args, kwargs, reads
        self.outputs: list[Value] = []

    @property
    def casts_a_weight(self) -> bool:
        return self.func is torch.ops.aten._to_copy.default and self.reads[0].given == "weight"


class Saved(NamedTuple):
    """Autograd saved a tensor. ``value`` is None where it cannot be followed."""

    value: Value | None
    geometry: Geometry | None
    dtype: torch.dtype


class Tap(NamedTuple):
    """Where a value passes a module inside the unit, so that a hook there sees it: the module's number (inverted: what
    it returns), which of its calls, and which argument."""

    module: int
    turn: int
    argument: int


class Tapped(NamedTuple):
    value: Value
    tap: Tap


class OpRecorder:
    """Notes one forward. ``keeps``: whether an expensive op is not to run again. ``everywhere``: it is handed all ops,
    not those inside of some modules alone, so that every write is seen."""

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        keeps: Callable[[Any], bool],
        *,
        everywhere: bool = True,
    ) -> None:
        self.timeline: list[RecordedOp | Saved | Tapped] = []
        self.tapped: dict[Tap, tuple[torch.Tensor, int]] = {}
        self.is_dynamic = False
        self.keeping = 0  # how many modules run whose expensive ops are not to run again
        self._everywhere, self._keeps, self.switches = everywhere, keeps, switches()
        self._flags = _flags()
        # by address of the storage; a weak reference tells it from another that got the address later
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}
        for given, tensors in (("input", inputs), ("weight", weights)):
            for number, tensor in enumerate(tensors):
                if tensor is not None and is_plain(tensor) and self._find(tensor) is None:
                    value = self._add(tensor)
                    value.given, value.number = given, number  # type: ignore[assignment]

    # What holds what.

    def _add(self, tensor: torch.Tensor) -> Value:
        storage, value = tensor.untyped_storage(), Value(tensor)
        self._values[storage._cdata] = weakref.ref(storage), value
        return value

    def _find(self, tensor: torch.Tensor) -> Value | None:
        storage = tensor.untyped_storage()
        known = self._values.get(storage._cdata)
        if known is None or known[0]() is not storage:
            return None
        if not self._everywhere and known[1].version != tensor._version:
            known[1].overwritten = True  # by an op that was not handed on
            return None
        return known[1]

    def _value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that a plain tensor looks into; None where it looks as another dtype."""
        if (value := self._find(tensor)) is None:
            value = self._add(tensor)
            value.foreign = True
        return value if value.dtype is tensor.dtype else None

    # What happens.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and note it."""
        kind = kind_of(func)
        again = kind in ("again", "blank", "writes again") or (
            kind == "heavy"
            and not (self.keeping or self._keeps(func))
            and not draws_random_numbers(func, args, kwargs)  # what is drawn must not be drawn again
        )
        # an op under switches or flags of the unit's own would run again without them
        again = again and switches() == self.switches and (kind != "heavy" or _flags() == self._flags)
        op = self._op(func, args, kwargs) if again else None
        out = func(*args, **kwargs)
        self.is_dynamic |= kind == "dynamic" or _selects_by_mask(func, args)
        if kind in ("writes", "writes again"):
            self._write(func, args, kwargs, op)
        elif kind != "view":
            for index, tensor in enumerate(out if type(out) in (tuple, list) else (out,)):
                # a known storage is no new value, but one that the op was given: a view unknown to autograd
                if isinstance(tensor, torch.Tensor) and is_plain(tensor) and self._find(tensor) is None:
                    value = self._add(tensor)
                    if kind == "blank":
                        value.blank, value.unwritten = op, tensor.numel()
                    elif op is not None:
                        value.op, value.index = op, index
                        op.outputs.append(value)
            if op is not None and op.outputs:
                self.timeline.append(op)
        return out

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedOp | None:
        """The op as it would run again; None where it reads what cannot be followed."""
        reads: list[Value] = []
        noted = [self._noted(arg, reads) for arg in args]
        named = {name: self._noted(arg, reads) for name, arg in kwargs.items()}
        return None if _UNKNOWN in noted or _UNKNOWN in named.values() else RecordedOp(func, noted, named, reads)

    def _noted(self, arg: Any, reads: list[Value]) -> Any:
        if isinstance(arg, torch.Tensor):
            value = self._value_of(arg) if is_plain(arg) else None
            if value is None:
                return _UNKNOWN
            reads.append(value)
            return Read(value, geometry_of(arg))
        if type(arg) in (list, tuple) and any(isinstance(part, torch.Tensor) for part in arg):
            parts = [self._noted(part, reads) for part in arg]
            return _UNKNOWN if _UNKNOWN in parts else parts
        return arg

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], op: RecordedOp | None) -> None:
        """``op``: the write as it would run again."""
        for position, name in written_by(func, STATISTICS):
            written = args[position] if position < len(args) else kwargs.get(name)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                    if (before := self._find(tensor)) is not None:
                        before.overwritten = True
                    value = self._add(tensor)
                    if op is None or before is None:
                        continue
                    if before.op is None and before.blank is not None:
                        self._made_by(before, before.blank)
                    if before.op is not None:
                        self._made_by(value, op)
                        value.unwritten = max(0, before.unwritten - tensor.numel())

    def _made_by(self, value: Value, op: RecordedOp) -> None:
        value.op = op
        op.outputs.append(value)
        self.timeline.append(op)

    def save(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor."""
        plain = is_plain(tensor)
        value = self._value_of(tensor) if plain else None
        geometry = geometry_of(tensor) if plain else None
        self.timeline.append(Saved(value, geometry, tensor.dtype))

    def pass_module(self, module: int, turn: int, tensors: Sequence[Any]) -> None:
        """A module inside was given ``tensors``, or returned them. They are held until the record is planned from.
        Inside of torch.vmap they have no memory of their own."""
        if current_transform() is not None:
            return
        for argument, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                value = self._find(tensor)
                if value is not None and value.geometry == geometry_of(tensor) and value.dtype is tensor.dtype:
                    tap = Tap(module, turn, argument)
                    self.timeline.append(Tapped(value, tap))
                    self.tapped[tap] = tensor.detach(), tensor._version

    def forget(self) -> None:
        """The record is not needed any more: ops and what they made hold one another."""
        for event in self.timeline:
            if isinstance(event, RecordedOp):
                event.outputs = []
        self.timeline, self._values, self.tapped = [], {}, {}


def _selects_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether values decide how many elements an index takes."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
