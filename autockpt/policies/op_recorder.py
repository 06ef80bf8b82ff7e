"""The forward of a unit with a tape running: which ops are noted, and which saved tensors are dropped for slots."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from autockpt.checkpointing.divergence import LookAt
from autockpt.checkpointing.fingerprint import Geometry, geometry_of
from autockpt.errors import ConflictError
from autockpt.policies.base import setting
from autockpt.policies.compiling import run_as_it_is
from autockpt.policies.compute_ops import (
    STATISTICS,
    Kind,
    draws_random_numbers,
    is_attention,
    is_collective,
    kind_of,
    written_by,
)
from autockpt.policies.conflicts import is_wrapped
from autockpt.policies.rerun_state.surroundings import switches
from autockpt.policies.saved import Kept
from autockpt.policies.tape import Maker, Origin, RemadeSlot, RerunOp, TensorArgument
from autockpt.policies.watching import Watching, count_writes, passes_by, refuse_untupled, refuse_watching
from autockpt.schema.choices import ATTENTION, EVERYTHING

SMALL = 16
"""A saved tensor this many times smaller than the unit's input (statistics of a norm) is not worth making again."""
_DEPTH = 64  # of ops between a saved tensor and what it could be made from; no search goes further back
_NOWHERE = float("inf")
PLAIN = (torch.Tensor, nn.Parameter)
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
_NAMES = """
    numpy data_ptr untyped_storage storage _typed_storage set_ share_memory_ resize_ __array__ __dlpack__
    __cuda_array_interface__ __array_interface__ __set__ __reduce_ex__ __deepcopy__
"""
HANDS_OUT = frozenset(_NAMES.split())
"""Functions that hand a tensor's memory to others, or exchange it."""


class Tape:
    """The tape of one call of a unit. ``keep`` names heavy ops whose outputs are not made again: all, fused attention.

    ``pack`` is the hook for what autograd saves. Between a tensor and what it could be made from that is held which
    costs fewer bytes, all that counts as held already being free. ``look_at`` is called with what is dropped.
    """

    def __init__(
        self,
        unit: str,
        inputs: Iterable[torch.Tensor],
        keep: Collection[str] = (),
        look_at: LookAt | None = None,
    ) -> None:
        self.unit = unit
        self._look_at = look_at
        self._everything, self._attention = EVERYTHING in keep, ATTENTION in keep
        self.keeping = False  # a module runs whose products are kept
        self.running = False
        self._maker = Maker(unit)
        self._sources: dict[int, Origin] = {}
        self.ops: list[RerunOp] = []
        # storages that were made here; and what is not followed: others that this forward has written to, as the next
        # may before backward, and all that others write to unseen
        self._own: set[int] = set()
        self._unfit: set[int] = set()
        self.packed = 0
        # for what follows in later calls: functions begun, whether one runs, whether it has made a number of a tensor,
        # when each tensor was saved, its source and layout, and whether something happened that functions do not tell
        self.step, self.made_number = 0, False
        self.within = self.astray = True
        self._written: dict[int, int] = {}
        self.log: list[tuple[int, Origin | None, Geometry | None]] = []
        self._small = max((t.nbytes for t in inputs if t.layout is torch.strided), default=0) // SMALL

    @property
    def path(self) -> tuple[int, int]:
        """What tells one way through the unit's forward from another: ops noted, tensors saved."""
        return len(self.ops), self.packed

    def forget(self) -> None:
        """The forward is over. Autograd holds on to ``pack``, and by that to this: not to what no slot needs."""
        self._sources, self.ops, self.log = {}, [], []

    # Noting ops.

    def note(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and note what it made; its answer."""
        again = kind == "again"
        if kind == "heavy" and not (self._everything or self.keeping or (self._attention and is_attention(func))):
            again = not draws_random_numbers(func, args, kwargs)
        if again and switches() != self._maker.switches:  # in a context of the unit's own: it would run again without
            again, self.astray = False, True
        op = self._op(func, args, kwargs) if again else None
        out = func(*args, **kwargs)
        free = op is not None and all(source.free for source in op.reads)
        for index, tensor in enumerate(out if type(out) in (tuple, list) else (out,)):
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                self._add(tensor, index, None if tensor.is_complex() else op, free)
        return out

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RerunOp | None:
        """The op as it would run again; None where it reads what a tape cannot follow."""
        reads: list[Origin] = []
        noted = [self._noted(arg, reads) for arg in args]
        named = {name: self._noted(arg, reads) for name, arg in kwargs.items()}
        if _LOST in noted or _LOST in named.values():
            return None
        op = RerunOp(len(self.ops), func, noted, named, reads)
        self.ops.append(op)
        return op

    def _noted(self, value: Any, reads: list[Origin]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._read(value, reads)
        if type(value) in (list, tuple) and any(isinstance(part, torch.Tensor) for part in value):
            parts = [self._noted(part, reads) for part in value]
            return _LOST if _LOST in parts else parts
        return value

    def _read(self, tensor: torch.Tensor, reads: list[Origin]) -> Any:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_neg():
            return _LOST
        source = self._known(tensor)
        if source is None or tensor.dtype is not source.dtype:
            return _LOST
        source.read = True
        reads.append(source)
        return TensorArgument(geometry_of(tensor))

    def _known(self, tensor: torch.Tensor) -> Origin | None:
        """The source that a tensor looks into. Of one that comes from outside, or was changed in place, what it is now
        is held."""
        storage = tensor.untyped_storage()
        source = self._find(tensor, storage)
        if source is None and not (tensor.is_inference() or storage._cdata in self._unfit):
            source = self._sources[storage._cdata] = Origin.of(tensor, storage)
            source.born = self.step
            source.hold(tensor)
        return source

    def _find(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Origin | None:
        """The source that a tensor looks into, unless it was changed in place since."""
        source = self._sources.get(storage._cdata)
        if source is None or source.storage() is not storage or source.version != tensor._version:
            return None
        return source

    def _add(self, tensor: torch.Tensor, index: int, op: RerunOp | None, free: bool) -> None:
        storage = tensor.untyped_storage()
        known = self._sources.get(storage._cdata)
        if known is not None and known.storage() is storage:
            return  # nothing new, but memory that was there before
        if tensor.is_inference():
            return  # it has no version counter, and autograd never saves it
        source = self._sources[storage._cdata] = Origin.of(tensor, storage)
        self._own.add(storage._cdata)
        source.born = self.step
        if op is not None:
            source.op, source.index, source.free = op, index, free
            op.outputs.append(weakref.ref(source))

    def renamed(self, out: Any) -> None:
        """A view of which autograd knows nothing takes its source's place: changes in place show there."""
        for tensor in out if type(out) in (tuple, list) else (out,):
            with torch._C.DisableTorchFunction():  # it is not the unit's code that asks for the memory
                source = self._find(tensor, tensor.untyped_storage())
            if source is not None and source.held is None and not tensor.is_neg():
                source.made = weakref.ref(tensor)

    def before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Some arguments are about to be changed: what is made from them as they are is made now, and held."""
        for position, name in written_by(func, STATISTICS):
            for tensor in tree_leaves(args[position] if position < len(args) else kwargs.get(name)):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self.changes(tensor, unseen=name in STATISTICS or is_collective(func))

    def changes(self, tensor: torch.Tensor, *, unseen: bool) -> None:
        """It is about to be written to; ``unseen``: from here on, and no version counter tells when."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if unseen or address not in self._own:
            self._unfit.add(address)
        source = self._sources.pop(address, None)
        if source is not None and source.storage() is not storage:
            source = None  # of memory that is gone, whose address another has now
        if self.step in (source and source.born, self._written.get(address)):
            self._written[address] = self.step  # a function's own affair
        else:
            self.astray = True
        if source is not None and (source.read or source.slots):
            self._cut(source, tensor)

    def _cut(self, changing: Origin, written: torch.Tensor) -> None:
        """What is made from a source, or is itself waited for, is held as it is: only then does backward meet a change
        by way of ``.data`` where plain training does. ``written``: the tensor by which the source is changed; where no
        other is left, backward refuses the source as changed."""
        self.astray = True
        tainted = {changing: None}  # in order, so that each is made from those before it
        for op in self.ops:
            if any(source in tainted for source in op.reads):
                outputs = [source for ref in op.outputs if (source := ref()) is not None and source.held is None]
                tainted |= dict.fromkeys(outputs)
        held = changing.held is not None and changing.held.untyped_storage() is written.untyped_storage()
        if not held and changing.waiting() and changing.present() is None:
            if written.dtype is not changing.dtype:
                raise ConflictError(
                    f"{self.unit} writes as {written.dtype} to the memory of a tensor ({changing.dtype}) that backward "
                    "needs and that is made again there",
                    remedy=f"Make a new tensor of the new values instead, or use `save` on {self.unit}.",
                )
            changing.hold(written)
        for source in tainted:
            if source.held is None and source.waiting():
                present = source.present()
                source.hold(self._maker.make(source) if present is None else present)
        for source in tainted:
            if source is not changing and source.held is None:
                source.op, source.free = None, False  # it can be held only

    # Deciding what is held.

    def pack(self, tensor: torch.Tensor) -> RemadeSlot | Kept:
        """The hook for autograd's packing."""
        self.packed += 1
        source = None
        if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_neg():
            source = self._known(tensor)
        if source is not None and source.dtype is not tensor.dtype:
            source = None
        if not self.astray:
            self.log.append((self.step, source, geometry_of(tensor) if source is not None else None))
        if source is None or source.held is not None:
            return Kept(tensor, self.unit)
        memo: dict[Origin, float] = {}
        if source.nbytes <= self._small or self._by_making(source, memo, _DEPTH) >= source.nbytes:
            source.hold(tensor)
            return Kept(tensor, self.unit)
        self._commit(source, memo)
        entry = self._look_at(tensor) if self._look_at is not None else None
        slot = RemadeSlot(self._maker, source, geometry_of(tensor), entry)
        source.slots.append(weakref.ref(slot))
        return slot

    def _by_making(self, source: Origin, memo: dict[Origin, float], depth: int) -> float:
        """Bytes that must be held besides for an op to make this; infinite where none can."""
        if source.free:
            return 0
        if source.op is None or depth == 0:
            return _NOWHERE
        return sum(self._by_any_way(read, memo, depth - 1) for read in set(source.op.reads))

    def _by_any_way(self, source: Origin, memo: dict[Origin, float], depth: int) -> float:
        """The same, or the bytes of the source itself where that is less."""
        if source not in memo:
            making = self._by_making(source, memo, depth)
            holding = source.nbytes if making and source.present() is not None else _NOWHERE
            memo[source] = min(making, holding)
        return memo[source]

    def _commit(self, source: Origin, memo: dict[Origin, float]) -> None:
        """Hold what the making of this rests on."""
        if source.free:
            return
        assert source.op is not None
        for read in source.op.reads:
            present = None if read.free else read.present()
            if present is not None and read.nbytes <= self._by_making(read, memo, _DEPTH):
                read.hold(present)
            else:
                self._commit(read, memo)
        source.free = True


_LOST = object()  # stands for a tensor that a tape cannot follow


class _Taping(Watching):
    def __init__(self, tape: Tape) -> None:
        super().__init__(tape.unit)
        self._tape = tape
        self.conditional: list[torch.Tensor] = []  # what torch.cond gave, no tuple
        self.maps = False  # a function that returns no tuple

    def look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if passes_by(func):
            self._tape.astray = True
            out = func(*args, **kwargs)
            if func is torch.ops.higher_order.cond and isinstance(out, torch.Tensor):
                self.conditional.append(out)
            elif func is torch.ops.higher_order.map_impl and isinstance(out, torch.Tensor):
                self.maps = True
            return out
        if not self._tape.within:
            self._tape.astray = True
        self._tape.made_number |= func is _NUMBER
        kind = kind_of(func)
        if kind == "view":
            return func(*args, **kwargs)
        if kind in ("writes", "statistics"):
            self._tape.before_write(func, args, kwargs)
        elif kind == "suspect":
            refuse_watching(func, args, self._tape.unit)
        if kind not in ("writes", "hidden view"):
            return self._tape.note(kind, func, args, kwargs)
        out = func(*args, **kwargs)
        if kind == "writes":
            count_writes(func, args)
        else:
            self._tape.renamed(out)
        return out


class HandingOut(TorchFunctionMode):
    """What the unit's code hands to others, who may write to it unseen, is not made again. ``data``: what it takes the
    ``.data`` of is handed out, too: not all of the unit's ops are seen."""

    def __init__(self, tape: Tape, *, data: bool) -> None:
        super().__init__()
        self._tape, self._data = tape, data

    @partial(run_as_it_is, calls=False)  # the tape is to see the compiler
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HANDS_OUT or (self._data and func == _DATA):
            tensor = args[0] if args else None
            if isinstance(tensor, torch.Tensor) and not (is_traceable_wrapper_subclass(tensor) or is_wrapped(tensor)):
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                    if tensor.layout is torch.strided:
                        self._tape.changes(tensor, unseen=True)
        return func(*args, **(kwargs or {}))


_current = threading.local()


def current(tape: Tape) -> AbstractContextManager[None]:
    """What runs inside finds the tape of its unit."""
    return setting(_current, "tape", tape)


def tape_of(unit: str) -> Tape | None:
    """The tape that runs for this unit."""
    tape: Tape | None = getattr(_current, "tape", None)
    return tape if tape is not None and tape.unit == unit else None


@contextmanager
def running(tape: Tape) -> Iterator[None]:
    """Ops inside are noted; once, where this is inside of itself."""
    if tape.running:
        yield
        return
    taping = _Taping(tape)
    with setting(tape, "running", True):
        try:
            with taping:
                yield
        finally:
            if taping.maps:
                refuse_untupled(tape.unit, "make torch's map return a tuple in place of a tensor")
        if any(tensor.requires_grad for tensor in taping.conditional):
            refuse_untupled(tape.unit, "leave torch.cond without a backward, as its functions return a tensor")
