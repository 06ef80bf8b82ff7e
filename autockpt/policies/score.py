"""What one call of a unit did, function by function, and what a later one can make again by doing the same.

Beside a tape (``op_recorder``), which notes ops below autograd, a call's functions of torch's are noted: with every
number, flag and type among their arguments, and where each tensor comes from. ``following`` holds later calls against
it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autockpt.checkpointing.fingerprint import Geometry, geometry_of
from autockpt.policies.casts import TO_COPY, CastsUsed, autocast_now, dispatch_modes, may_be_remembered
from autockpt.policies.compiling import run_as_it_is
from autockpt.policies.compute_ops import METADATA
from autockpt.policies.conflicts import is_wrapped, sequence_nr
from autockpt.policies.op_recorder import HANDS_OUT, PLAIN, Tape
from autockpt.policies.tape import Origin, RerunOp

_EXACT = frozenset(
    (
        *(type(None), bool, int, float, str, type(Ellipsis)),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
_MADE_OF_OTHERS: Any = torch._C.DispatchKey.CompositeImplicitAutograd
_MADE, SAVED = -1, -2  # in place of a tensor's number: an op makes it; it is had where autograd saves it


Met = list[weakref.ref[torch.Tensor]]
"""The tensors that a call has met, in order: what it is given, then what functions return."""


class _Unfit(Exception):
    """What cannot be followed: arguments that cannot be compared, functions that may do as they like."""


class Ordinal(int):
    """Stands for a tensor: the how manieth that the call has met."""


class _Parts(NamedTuple):
    kind: type
    parts: tuple[Any, ...]


class FunctionCall:
    """One call of a function of torch's. ``packs``: tensors saved before it; ``first``: the number of the first tensor
    that it gives, of ``leaves``; ``holds``: which of them are held, with their form; ``autocast`` as it was then;
    ``casts``: which casts of leaves it used, as ``CastsUsed`` says, with the numbers of the leaves."""

    __slots__ = (
        *("_count", "_kwargs", "_places", "_rest", "autocast", "casts", "first", "func", "holds", "leaves", "packs"),
    )

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], packs: int, first: int) -> None:
        self.func, self.packs, self.first, self.autocast = func, packs, first, autocast_now()
        self._count, self._kwargs = len(args), kwargs
        self._places = [(position, int(arg)) for position, arg in enumerate(args) if type(arg) is Ordinal]
        self._rest = [(position, arg) for position, arg in enumerate(args) if type(arg) is not Ordinal]
        self.leaves = 0
        self.casts: tuple[int, list[tuple[int, int, bool]]] | None = None
        self.holds: dict[int, tuple[Geometry, torch.dtype]] = {}

    def uses(self, used: CastsUsed, results: Sequence[torch.Tensor], begin: int, met: Met) -> bool:
        """Whether a function that gave ``results`` used the same casts, each made by its call where it was then."""
        assert self.casts is not None
        nodes, found = used.by(results, begin)
        if nodes != self.casts[0] or len(found) != len(self.casts[1]):
            return False
        pairs = zip(found, self.casts[1], strict=True)
        return all([cast[1:] == known[1:] and met[known[0]]() is cast[0] for cast, known in pairs])

    def agrees(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, met: Met) -> bool:
        """Whether a function is given the same. This and ``fits`` are most of what following costs."""
        if len(args) != self._count:
            return False
        for position, number in self._places:
            tensor = met[number]()
            if tensor is None or tensor is not args[position]:
                return False
        for position, pattern in self._rest:
            value = args[position]
            if value is not pattern and not fits(value, pattern, met):
                return False
        if not kwargs:
            return not self._kwargs
        expected = self._kwargs
        return len(kwargs) == len(expected) and all(
            [name in expected and fits(value, expected[name], met) for name, value in kwargs.items()]
        )


def fits(value: Any, pattern: Any, met: Met) -> bool:
    """Whether an argument is what it was."""
    if value is pattern:
        return True
    kind = type(pattern)
    if kind is Ordinal:
        return value is not None and met[pattern]() is value
    if kind is not _Parts:
        return type(value) is kind and value == pattern and (kind is not float or repr(value) == repr(pattern))
    if type(value) is not pattern.kind:
        return False
    parts = (value.start, value.stop, value.step) if pattern.kind is slice else value
    return len(parts) == len(pattern.parts) and all([fits(*pair, met) for pair in zip(parts, pattern.parts)])  # noqa: B905


def leaves_of(out: Any) -> Sequence[torch.Tensor]:
    """The tensors that a function returned."""
    if type(out) in PLAIN:
        return (out,)
    return [part for part in out if type(part) in PLAIN] if isinstance(out, (tuple, list)) else ()


def is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or is_wrapped(tensor):
        return False
    return not (tensor.is_complex() or tensor.is_inference() or tensor.is_neg())


_UNTOLD = HANDS_OUT | {"tensor_split", "ctc_loss"}
"""Functions after which anything may be in a tensor, and such as make numbers of one, of which no op tells."""


def _hides_code(func: Any) -> bool:
    """Whether a function, or an op made of others, is somebody's own: its code may do with what it is given as it likes
    each time."""
    if not isinstance(func, (OpOverload, OpOverloadPacket)):
        return not (getattr(func, "__module__", None) or "torch").startswith("torch")
    ops = [func] if isinstance(func, OpOverload) else [getattr(func, name) for name in func.overloads()]
    return any(op.namespace != "aten" and op.has_kernel_for_dispatch_key(_MADE_OF_OTHERS) for op in ops)


class Learning(TorchFunctionMode):
    """Notes a call's functions beside a tape that notes its ops."""

    def __init__(self, tape: Tape, outside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tape, self._outside = tape, outside
        if all(map(is_plain, outside)):
            tape.within = tape.astray = False
        self._steps: list[FunctionCall] = []
        self._givers: list[FunctionCall | None] = []  # of each tensor that the call has met: the function that gave it
        self._met: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id, with its number
        # of each storage the tensor by which it was met first
        self._first: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Geometry, torch.dtype]] = {}
        # autocast may remember casts of leaves, not of views: addresses and layouts of these, and ops whose cast no
        # graph shows
        self._leaves: set[tuple[int, Geometry]] = set()
        self._unshown: set[int] = set()
        self._used = CastsUsed()
        for tensor in outside:
            self._meet(tensor, None)

    @partial(run_as_it_is, calls=False)  # the tape is to see the compiler
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape, kwargs = self._tape, kwargs or {}
        if tape.astray or func in METADATA:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        try:
            if dispatch_modes() > 1 or name in _UNTOLD or _hides_code(func):
                raise _Unfit
            patterns = tuple(map(self._pattern, args)), {name: self._pattern(arg) for name, arg in kwargs.items()}
            if not torch.is_grad_enabled() and autocast_now() and any(map(self._is_leaf, tree_leaves((args, kwargs)))):
                raise _Unfit  # no graph shows which cast it is given
        except _Unfit:
            tape.astray = True
            return func(*args, **kwargs)
        step, begin = FunctionCall(func, *patterns, tape.packed, len(self._givers)), (tape.path[0], sequence_nr())
        self._steps.append(step)
        tape.step, tape.within, tape.made_number = len(self._steps), True, False
        try:
            out = func(*args, **kwargs)
        except BaseException:
            tape.astray = True
            raise
        finally:
            tape.within = False
        leaves = leaves_of(out)
        if tape.made_number and (leaves or out is None):  # an index, a slope: no argument tells
            tape.astray = True
        if step.autocast is not None:
            self._note_casts(step, leaves, *begin)
        for tensor in leaves:
            self._meet(tensor, step)
        step.leaves = len(leaves)
        return out

    def _note_casts(self, step: FunctionCall, leaves: Sequence[torch.Tensor], op: int, begin: int) -> None:
        """What a function of these results, before which ``op`` ops had been noted, has cast of weights."""
        before = self._used.count
        nodes, found = self._used.by(leaves, begin)
        shown = {number for _, number, own in found if own and number >= before}
        made = [op.number for op in self._tape.ops[op:] if self._casts_a_leaf(op)]
        if len(made) != len(shown):
            self._unshown.update(made)
        casts = [(self._met[id(leaf)][1], number, own) for leaf, number, own in found if id(leaf) in self._met]
        self._tape.astray |= len(casts) < len(found)
        step.casts = (nodes, casts) if casts else None

    @staticmethod
    def _is_leaf(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and may_be_remembered(value)

    def _casts_a_leaf(self, op: RerunOp) -> bool:
        held = op.reads[0].held if op.func is TO_COPY else None
        return held is not None and (held.untyped_storage()._cdata, op.args[0].geometry) in self._leaves

    def _pattern(self, value: Any) -> Any:
        """What to hold a later argument against. Raises _Unfit."""
        kind = type(value)
        if kind in _EXACT:
            return value
        if kind in PLAIN and (known := self._met.get(id(value))) is not None and known[0]() is value:
            return Ordinal(known[1])
        if kind is slice:
            return _Parts(kind, tuple(map(self._pattern, (value.start, value.stop, value.step))))
        if kind in (tuple, list):
            return _Parts(kind, tuple(map(self._pattern, value)))
        raise _Unfit

    def _meet(self, tensor: torch.Tensor, giver: FunctionCall | None) -> None:
        number = len(self._givers)
        self._givers.append(giver)
        self._met[id(tensor)] = weakref.ref(tensor), number
        if self._tape.astray or not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        if may_be_remembered(tensor):
            self._leaves.add((storage._cdata, geometry_of(tensor)))
        known = self._first.get(storage._cdata)
        if known is None or known[0]() is not storage:
            self._first[storage._cdata] = (weakref.ref(storage), number, geometry_of(tensor), tensor.dtype)

    def score(self) -> RecordedCall | None:
        """What later calls can follow; None where this one did what cannot be told from functions."""
        try:
            return None if self._tape.astray else self._score(RecordedCall(self._steps, self._tape.path[0]))
        except _Unfit:
            return None

    def _score(self, score: RecordedCall) -> RecordedCall:
        known: dict[Origin, Origin] = {}  # to what stands for it in later calls
        for _, source, _ in self._tape.log:
            if source is not None and source.held is None:  # what is held in any case need not be made
                known.setdefault(source, source.without_memory())
        ops = self._leading_to(known)
        if any(op.number in self._unshown for op in ops):
            raise _Unfit
        # of what each is made from, which the call meets last, and which it saves last
        latest = {source: self._held(source, score) for source in known}
        score.sources = {known[source]: number for source, number in latest.items()}
        first_saved = {source: number for number, (_, source, _) in reversed([*enumerate(self._tape.log)])}
        saved = {source: first_saved.get(source, sys.maxsize) for source in known if latest[source] == SAVED}
        for op in ops:
            made = op.makes(known)
            latest |= dict.fromkeys(made, max((latest[read] for read in op.reads), default=_MADE))
            saved |= dict.fromkeys(made, max((saved.get(read, -1) for read in op.reads), default=-1))
            score.ops.append(op.on(known))
        for number, (at, source, geometry) in enumerate(self._tape.log):
            if source is None or source not in known or (source.held is not None and latest[source] != SAVED):
                score.packs.append((at, None, None, None))
                continue
            # a call that goes another way in that very function could not make it
            met = self._steps[at - 1].first if at else len(self._outside)
            if latest[source] >= met or saved.get(source, -1) > number:
                raise _Unfit
            score.packs.append((at, geometry, source.dtype, known[source]))
        return score

    @staticmethod
    def _leading_to(known: dict[Origin, Origin]) -> list[RerunOp]:
        """The ops that make sources, in order; what they are made from is added to ``known``. Raises _Unfit."""
        ops: dict[int, RerunOp] = {}
        open_ends = [source for source in known if source.held is None]
        while open_ends:
            op = open_ends.pop().op
            if op is None:
                raise _Unfit
            ops[op.number] = op
            new = dict.fromkeys(read for read in op.reads if read not in known)
            known.update({read: read.without_memory() for read in new})
            open_ends += [read for read in new if read.held is None]
        return [ops[number] for number in sorted(ops)]

    def _held(self, source: Origin, score: RecordedCall) -> int:
        """The number of the tensor by which a later call has the bytes of a source, _MADE or SAVED."""
        if source.held is None:
            return _MADE
        storage = source.held.untyped_storage()
        first = self._first.get(storage._cdata)
        if first is None or first[0]() is not storage:
            return SAVED
        _, number, geometry, dtype = first
        giver = self._givers[number]
        (score.holds if giver is None else giver.holds)[number] = geometry, dtype
        return number


class RecordedCall:
    """One way through a unit: its functions, what is done with each saved tensor, and how those dropped are made.

    ``packs``: after how many functions a tensor is saved, its layout and type, and its source; None for these where it
    is kept and nothing is made from it. ``holds``: what is held of the tensors that a call is given. ``sources``: each
    with the number of the tensor that a call holds for it, SAVED or one for what an op makes. ``noted``: ops. It holds
    no tensor itself.
    """

    def __init__(self, steps: list[FunctionCall], noted: int) -> None:
        self.steps, self.noted = steps, noted
        self.packs: list[tuple[int, Geometry | None, torch.dtype | None, Origin | None]] = []
        self.holds: dict[int, tuple[Geometry, torch.dtype]] = {}
        self.sources: dict[Origin, int] = {}
        self.ops: list[RerunOp] = []

    def sources_of(self, held: dict[int | Origin, tuple[torch.Tensor, int]]) -> dict[Origin, Origin]:
        """What stands for these sources in one call, with the ops that make them, from what it holds: by the numbers
        of tensors, or because it was saved by its source."""
        own = {source: source.without_memory() for source in self.sources}
        for source, number in self.sources.items():
            if (known := held.get(source if number == SAVED else number)) is not None:
                own[source].held, own[source].version = known
        for op in self.ops:
            op.on(own)
        return own
