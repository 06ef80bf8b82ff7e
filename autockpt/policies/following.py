"""A tape followed by later calls of its unit, without a look at each op.

A dispatch mode costs a tiny layer more than its own forward. So a call is noted op by op once; later ones of the same
kind are seen at torch's functions only (``TorchFunctionMode``, a third of the cost), and every function is held against
what it was then: which function, every number, flag and type among its arguments, where each tensor comes from, and
what autograd had saved by then. So far as all agree, a tensor that is saved at the same position can be made again as
it could then, by the same ops from what this call holds.

Nothing is taken for granted about what the unit reads: where a function is another one, or gets something else, all
that was dropped is made at once, before that function runs, and from there on all is kept. The next call is noted anew.

Autocast remembers its casts of weights until its outermost block ends, and may hand out one of a weight that had other
values then. So the graph of what a function returns must show the same casts, made by its call where they were then.

What cannot be told from functions is not followed: tensors written to, memory handed to others (NumPy, pointers),
tensors of subclasses, other modes, ops that run outside of torch's functions, and which kernels the unit's own code
chooses for an op.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.checkpointing.autocast import autocast_block
from autockpt.checkpointing.divergence import LookAt
from autockpt.checkpointing.fingerprint import geometry_of
from autockpt.policies.base import places_of
from autockpt.policies.casts import CastsUsed, autocast_now, dispatch_modes
from autockpt.policies.compiling import run_as_it_is
from autockpt.policies.compute_ops import METADATA
from autockpt.policies.conflicts import sequence_nr
from autockpt.policies.op_recorder import PLAIN
from autockpt.policies.rerun_state.code import Code
from autockpt.policies.saved import Kept
from autockpt.policies.score import SAVED, FunctionCall, Met, RecordedCall, is_plain, leaves_of
from autockpt.policies.tape import Maker, Origin, RemadeSlot

_MISSES = 3  # times that a unit may turn out not to do what it did, and that one way is noted in vain
_WAYS = 16  # of one unit, by the forms of what it is given
_NO_PACK = (-1, None, None, None)


class _Call(Maker):
    """What one call holds until backward. Its sources are put together at the first use of one: graphs without backward
    need none. From there on the slots alone have them."""

    def __init__(self, unit: str, score: RecordedCall) -> None:
        super().__init__(unit)
        self._score = score
        # by number, or source where it was saved: each with its version
        self.held: dict[int | Origin, tuple[torch.Tensor, int]] = {}
        self.slots: list[weakref.ref[RemadeSlot]] = []
        self.ready = False

    def hold(self, number: int | Origin, tensor: torch.Tensor) -> None:
        held = tensor.detach()
        self.held[number] = held, held._version

    def put_sources_together(self) -> None:
        with self.lock:
            if self.ready:
                return
            self.ready = True
            sources = self._score.sources_of(self.held)
            self.held = {}
            for ref in self.slots:
                if (slot := ref()) is not None:
                    slot.source = sources[slot.source]
                    slot.source.slots.append(ref)


_END = FunctionCall(None, (), {}, -1, 0)


class Following(TorchFunctionMode):
    """A call that follows a score, as far as it does the same. ``pack`` is the hook for what autograd saves."""

    def __init__(
        self,
        unit: str,
        score: RecordedCall,
        outside: Sequence[torch.Tensor],
        look_at: LookAt | None,
    ) -> None:
        super().__init__()
        self._unit, self._look_at = unit, look_at
        self._packs, self._sources, self._used = score.packs, score.sources, CastsUsed()
        self._met: Met = list(map(weakref.ref, outside))
        self._dropped: list[weakref.ref[torch.UntypedStorage]] = []  # what each slot was dropped from
        self._doubtful: list[torch.Tensor] = []  # saved by a function that uses casts of weights
        self._call = _Call(unit, score)
        self._at = self.packed = 0
        self._doubts = False
        self.lost = False
        self._steps = iter(score.steps)
        self._next = next(self._steps, _END)
        for number in score.holds:  # of the form that they had, as the key of ``RecordedCalls`` says
            self._call.hold(number, outside[number])

    @run_as_it_is
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs) if kwargs else func(*args)
        step = self._next
        if (
            (func is not step.func and func != step.func)
            or self.packed != step.packs
            or autocast_now() != step.autocast
            or dispatch_modes()
            or not step.agrees(args, kwargs, self._met)
        ):
            if func not in METADATA:  # no step of a score is
                self.leave()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._at += 1
        self._next = next(self._steps, _END)
        self._doubts = step.casts is not None
        begin = sequence_nr() if self._doubts else 0
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:
            self.leave()
            raise
        if self._doubts:
            if not self.lost and not step.uses(self._used, leaves_of(out), begin, self._met):
                self.leave()
            self._doubts, self._doubtful = False, []
        if type(out) is torch.Tensor and step.leaves == 1 and not step.holds:  # nearly always
            self._met.append(weakref.ref(out))
        else:
            self._returned(step, leaves_of(out))
        return out

    def __exit__(self, *raised: Any) -> None:
        """Autograd holds on to ``pack``, and by that to this."""
        super().__exit__(*raised)
        self._met, self._dropped, self._doubtful, self._used = [], [], [], CastsUsed()

    def _returned(self, step: FunctionCall, leaves: Sequence[torch.Tensor]) -> None:
        if len(leaves) != step.leaves:
            self.leave()
        for tensor in leaves:
            form = step.holds.get(len(self._met))
            if form is not None and not self.lost:
                if (geometry_of(tensor), tensor.dtype) == form:
                    self._call.hold(len(self._met), tensor)
                else:
                    self.leave()
            self._met.append(weakref.ref(tensor))

    def pack(self, tensor: torch.Tensor) -> RemadeSlot | Kept:
        """The hook for autograd's packing."""
        number = self.packed
        self.packed = number + 1
        if self.lost:
            return Kept(tensor, self._unit)
        at, geometry, dtype, source = self._packs[number] if number < len(self._packs) else _NO_PACK
        if at != self._at or self._call.ready:  # a gradient was taken inside of the forward
            self.leave()
        if geometry is None or source is None or self.lost:
            return Kept(tensor, self._unit)
        if tensor.dtype is not dtype or type(tensor) not in PLAIN or geometry_of(tensor) != geometry:
            self.leave()
            return Kept(tensor, self._unit)
        if self._sources[source] == SAVED:
            self._call.hold(source, tensor)
            return Kept(tensor, self._unit)
        entry = self._look_at(tensor) if self._look_at is not None else None
        slot = RemadeSlot(self._call, source, geometry, entry)
        if self._doubts:
            self._doubtful.append(tensor)
        self._dropped.append(weakref.ref(tensor.untyped_storage()))
        self._call.slots.append(weakref.ref(slot))
        return slot

    def leave(self) -> None:
        """The call does something else: what was dropped is made now, while all that it is made from is as it was.

        What is still there is held instead, so that backward meets a change by way of ``.data`` or NumPy as in plain
        training. Dispatch modes and inference mode that the call has entered by now are not what its ops ran under.
        """
        if self.lost:
            return
        self.lost, self._next = True, _END
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False):
            self._call.put_sources_together()
            met = (*[ref() for ref in self._met], *self._doubtful) if self._dropped else ()
            present = {t.untyped_storage(): t for t in met if t is not None and is_plain(t)}
            for ref, from_storage in zip(self._call.slots, self._dropped, strict=True):
                slot, storage = ref(), from_storage()
                if slot is not None and slot.source.held is None:
                    tensor = present.get(storage) if storage is not None else None
                    slot.source.hold(self._call.make(slot.source) if tensor is None else tensor)


class RecordedCalls:
    """What the calls of one unit taught: the ways through it that can be followed. ``code``: what its code may do;
    ``checked``: ways on which no function was found whose ops nobody sees."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.checked: set[tuple[int, ...] | None] = set()
        self.scores: dict[Any, RecordedCall] = {}
        self._block: int | None = None  # of autocast's, in which the last call ran
        self._own: list[tuple[Any, str]] | None = None
        self._left = 0
        self._in_vain: Counter[Any] = Counter()

    def given(self, module: nn.Module, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """What a call is given: ``tensors`` in its arguments, parameters and buffers. And a key, equal for calls that
        may go the same way; None where it is neither to be followed nor to be learned from."""
        if self._left >= _MISSES or self._in_vain.total() >= _WAYS or self.code.chooses_kernels:
            return tensors, None
        earlier, self._block = self._block, autocast_block()
        if torch._C._len_torch_function_stack() or dispatch_modes():
            return tensors, None
        if self._own is None:
            self._own = places_of(module, "_parameters", "_buffers")
        outside = [*tensors, *(tensor for home, name in self._own if (tensor := home.get(name)) is not None)]
        try:
            storages = [tensor.untyped_storage()._cdata for tensor in outside]
            forms = [
                (type(t), t.dtype, t.device, t.shape, t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf)
                for t in outside
                if not (t.is_neg() or t.is_inference())
            ]
        except RuntimeError:  # sparse and the like
            return outside, None
        shared = tuple(map(storages.index, storages)) if len(set(storages)) < len(storages) else ()
        # in the same block it finds the casts that an earlier call made
        settings = torch.get_default_dtype(), autocast_now(), self._block == earlier, shared
        key = (*settings, *forms) if len(forms) == len(outside) else None
        return outside, None if self._in_vain and self._in_vain[key] >= _MISSES else key

    def learn(self, key: Any, score: RecordedCall | None) -> None:
        """A call was noted; what can be followed of it."""
        if score is None or len(self.scores) >= _WAYS:
            self._in_vain[key] += 1
        else:
            self.scores[key] = score

    def missed(self, key: Any) -> None:
        """A call did something else than this score."""
        self._left += 1
        self.scores.pop(key, None)
        self._own = None
