"""Keep the outputs of some calls inside a unit, and hand them out where the unit's forward runs again.

A call, of a module or of a function, need not run again if three things are known of it: what it returned, how many
tensors autograd saved during it, and where each of these comes from. Most come from what the call was given: an input
or a weight, a view of one, or autocast's cast of one. A recomputation has all of these at hand. The others are the
call's own, such as attention's sums of exponentials, and are kept with the output. So the recomputation skips the call:
it fills the frame's next numbers with these tensors, in their order, and goes on with the output. The graph behind the
output is missing then. That only matters to a unit that takes a gradient inside its forward: all of it runs again.

No op is watched: a scope is an ordinary call around a module's forward, or a function mode around modules that call
attention functions. What cannot be skipped runs again: calls whose output the unit changes in place, that draw random
numbers, or that save more of their own than a quarter of their output.

Where saved tensors come from is learned in the first calls (``Layout``). In later calls of equal arguments a scope does
no more than hold its output, and attention runs without a mode: its output is among the tensors that it saves. When the
forward has ended, it must have saved tensors of the same sizes as the call that was learned from. Otherwise nothing is
kept of it, and it is learned from again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from autockpt.checkpointing.fingerprint import fingerprint, form_of, layout_of, quietly, why_not
from autockpt.checkpointing.frame import CheckpointFrame, diverged
from autockpt.checkpointing.op_table import draws_random_numbers
from autockpt.checkpointing.unit import CheckpointedUnit, Exchanged

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_MOST_FUNCTIONS, _MOST_LAYOUTS = 4096, 16
_OWN_SHARE = 4  # what a call saves of its own is kept up to this part of its output
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # type: ignore[attr-defined]
_observers: list[dict[str, int]] = []


class _Here(threading.local):
    frame: KeepingFrame | None = None


_here = _Here()


@contextmanager
def given_up() -> Iterator[dict[str, int]]:
    """Counts, by unit, the calls in scopes whose outputs could not be kept."""
    counts: dict[str, int] = {}
    _observers.append(counts)
    try:
        yield counts
    finally:
        _observers[:] = [other for other in _observers if other is not counts]


class Scope:
    """Where calls are kept, in all calls of a unit: one of its modules, or functions that this calls."""

    def __init__(self) -> None:
        self.again: set[Any] = set()  # modules or functions that were seen to draw random numbers
        self.called = False  # one of its functions, in a checked call

    def __reduce__(self) -> tuple[type[Scope], tuple[()]]:
        return Scope, ()  # a copy learns anew


class Source(NamedTuple):
    """Where a saved tensor comes from: its ``number`` among what the call was given, with these ``strides``. The call's
    own have negative numbers, from -1 downwards. ``cast``: to which type. ``geometry``: the saved tensor's size and
    strides, and its offset from where that begins; None where it is that itself."""

    number: int
    strides: tuple[int, ...] | None = None
    cast: torch.dtype | None = None
    geometry: tuple[torch.Size, tuple[int, ...], int] | None = None


class Learned(NamedTuple):
    """One call in a scope, as later ones will be.

    ``sources`` of what it saves; None where it runs again. ``own``: which of the unit's saved tensors are of its own
    making. ``leaves``: which of these it returns, one for each tensor of its output; None where others do, so that its
    output has to be caught. ``trains``: which of them have a gradient. ``is_needed``: the unit saves more after it.
    ``begin``: how many tensors the unit had saved before it.
    """

    scope: Scope
    function: Any
    sources: Sequence[Source] | None
    own: Sequence[int]
    leaves: Sequence[int] | None
    trains: Sequence[bool]
    is_tuple: bool
    is_needed: bool
    begin: int


class Layout:
    """What calls in scopes, in order, save and return in calls of a unit that save tensors of these ``sizes``."""

    def __init__(self, sizes: list[int], calls: list[Learned]) -> None:
        self.sizes, self.calls = sizes, calls
        self.caught = [call for call in calls if call.leaves is None]
        self.catches_functions = any(not isinstance(call.function, nn.Module) for call in self.caught)
        self.kept_numbers = {number for call in calls for number in (*call.own, *(call.leaves or ()))}
        self.lost = [call.sources is None for call in calls].count(True)


Held = Sequence[tuple[Any, int]]
"""An output: aliases of its tensors without a graph, which share their version counters, with their versions."""


class KeepingFrame(CheckpointFrame):
    """One call of a unit whose scopes keep outputs, and hand them out in its recomputation.

    What it keeps is ``_caught``, outputs of calls, and ``_wanted``, saved tensors by their number. Both go by the
    ``_layout``, which is learned from ``_drafts`` where it is not known yet.
    """

    __slots__ = (
        *("_awaited", "_begins", "_caught", "_drafts", "_handing", "_is_inside", "_is_lost", "_key", "_layout"),
        *("_mode", "_noted", "_wanted", "name"),
    )

    def __init__(self, unit: CheckpointedUnit, *given: Any, **named: Any) -> None:
        if unit.check is not None:
            unit.check.in_turn = True
        super().__init__(unit, *given, **named)
        self.name = unit.name
        trains = [parameter is not None and parameter.requires_grad for parameter in self._parameters]
        inputs = [(t.shape, t.dtype, t.requires_grad) for t in self._live or () if not t.is_nested]
        self._key = (*inputs, *trains, *self._training, self._context.autocast.key)
        self._layout: Layout | None = None if self.checked else unit.learned.get(self._key)
        self._caught: list[Held | None] = []
        self._drafts: list[Draft] = []
        self._noted: list[torch.Tensor] | None = None  # what is saved in a call that is learned from
        self._wanted: dict[int, Any] = {}
        # From the first recomputation on. Outputs are handed out once: a later backward runs everything again.
        self._handing: dict[Scope, Iterator[tuple[Learned, Held | None]]] | None = None
        self._is_inside = False  # a call in a scope
        self._is_lost = False
        self._begins: dict[Scope, int] = {}  # when functions in a scope are first to be handed out
        self._awaited, self._mode = -1, None  # the number of tensors at which a mode is to be entered
        if self._layout is None:
            self._beyond = 0
        else:
            self._wanted = dict.fromkeys(self._layout.kept_numbers)
            self._looked_at = {*self._wanted, *self._looked_at}

    # In forward.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As ``CheckpointFrame.run``."""
        outer, _here.frame = _here.frame, self
        try:
            output = super().run(args, kwargs)
        finally:
            _here.frame = outer
        drafts, layout = self._drafts, self._layout
        self._drafts = []
        if self._handing is not None:  # a gradient was taken inside the forward
            return output
        if layout is None:
            layout = self._layout = self._learn(drafts)
        elif self._is_lost or self._sizes != layout.sizes or len(self._caught) != len(layout.caught):
            self._layout, self._caught, self._wanted = None, [], {}
            self._unit.learned.pop(self._key, None)
            return output
        for counts in _observers:
            counts[self.name] = counts.get(self.name, 0) + layout.lost
        return output

    def watches(self, scope: Scope) -> bool:
        """Whether functions that a scope calls have to be looked at now."""
        if self._handing is not None:
            return scope in self._handing
        if self._layout is not None:
            return self._layout.catches_functions
        return scope.called or self.checked

    def call(
        self, scope: Scope, function: Any, run: Callable[[], Any], given: Callable[[], Sequence[torch.Tensor | Any]]
    ) -> Any:
        """``run()``, which calls ``function`` with what is ``given``, or what it returned in the first run."""
        if self._is_inside:
            return run()
        self._is_inside = True
        try:
            if self._handing is not None:
                return self._hand_out(scope, function, run, given)
            if self._layout is None:
                return self._learn_from(scope, function, run, given)
            output = run()
            caught, number = self._layout.caught, len(self._caught)
            if number < len(caught) and caught[number].function is function:
                self._caught.append(_held(output) if caught[number].is_needed else ())
            else:
                self._is_lost = True
            return output
        finally:
            self._is_inside = False

    def _look_at(self, number: int, tensor: torch.Tensor) -> None:
        if self._noted is not None:
            self._noted.append(tensor)
        if number in self._wanted:
            self._wanted[number] = tensor.detach(), tensor._version
        super()._look_at(number, tensor)

    def _learn_from(self, scope: Scope, function: Any, run: Callable[[], Any], given: Callable[[], Any]) -> Any:
        """A call of which it is not known yet what it saves."""
        place = len(self._drafts)
        self._drafts.append(Draft(scope, function))  # first, for calls that fail: the unit may go on
        before = self._context.now() if self.checked else None
        self._noted = noted = []
        try:
            output = run()
        finally:
            self._noted = None
        if before is not None and not all(map(_equal, before.tensors, self._context.now().tensors)):
            scope.again.add(function)
        if function not in scope.again:
            with torch._C.DisableTorchFunction():
                draft = drafted(scope, function, output, noted, given(), len(self._sizes))
            if draft is not None:
                self._drafts[place] = draft
                if self.checked and not self._unit.is_measured:
                    draft.look_at_memory()
        return output

    def _learn(self, drafts: list[Draft]) -> Layout:
        """The forward has ended. Outputs that it changed, or after which nothing is saved, need not be held."""
        calls, is_ambiguous = list[Learned](), False
        for draft in drafts:
            if draft.wrote_unseen():
                draft.scope.again.add(draft.function)
                draft.sources = None
            if draft.sources is None or _is_changed(draft.outputs):
                draft = Draft(draft.scope, draft.function)
            calls.append(draft.learned(len(self._sizes)))
            is_ambiguous |= draft.is_ambiguous
            self._wanted |= draft.own
            if calls[-1].leaves is None:
                self._caught.append(draft.outputs if calls[-1].is_needed else ())
        layout, layouts = Layout(self._sizes, calls), self._unit.learned
        if not is_ambiguous:
            if len(layouts) >= _MOST_LAYOUTS:  # batches without padding have new lengths in every step
                layouts.clear()
            layouts[self._key] = layout
        return layout

    # In backward.

    def _run_again(self, inputs: list[torch.Tensor], exchanged: Sequence[Exchanged]) -> Any:
        layout, caught, by_scope = self._layout, iter(self._caught), dict[Scope, list[tuple[Learned, Held | None]]]()
        # where a gradient is taken inside the forward, its recomputation needs the whole graph
        for call in layout.calls if layout is not None and self._live is None else ():
            outputs = next(caught) if call.leaves is None else [self._wanted[number] for number in call.leaves]
            # not in one row: a scope that is entered in one of the two runs only does not shift the others
            by_scope.setdefault(call.scope, []).append((call, outputs))
            if call.sources is not None:
                self._begins.setdefault(call.scope, call.begin)
        # let go of with the tensors that backward gets
        self._handing, self._layout, self._caught = {scope: iter(some) for scope, some in by_scope.items()}, None, []
        outer, inside, _here.frame, self._is_inside = _here.frame, self._is_inside, self, False
        try:
            return super()._run_again(inputs, exchanged)
        finally:
            _here.frame, self._is_inside, self._handing, self._wanted = outer, inside, {}, {}
            self._begins, self._awaited, self._mode = {}, -1, None

    def repack(self, tensor: torch.Tensor) -> torch.Tensor:
        """As ``CheckpointFrame.repack``."""
        value = super().repack(tensor)
        # inside of a mode of the unit's own it would end in another order than it began: attention then runs again
        if self._filled == self._awaited and self._mode is not None and not _function_modes():
            self._mode.start()
        return value

    def awaits(self, scope: Scope, mode: FunctionScopes) -> bool:
        """Whether a mode can do without looking at the functions that come before the first to be handed out. It is
        started when the tensors before that are there: a mode costs as much as a small op for every function."""
        begin = self._begins.get(scope)
        if begin is None or begin <= self._filled or self._mode is not None or _function_modes():
            return False
        self._awaited, self._mode = begin, mode
        return True

    def _hand_out(self, scope: Scope, function: Any, run: Callable[[], Any], given: Callable[[], Any]) -> Any:
        """What the call returned, once all that it saved is filled in. ``run()`` where it cannot be skipped.

        Raises ConflictError where the unit calls another function in its place.
        """
        assert self._handing is not None
        call, outputs = next(self._handing.get(scope, _NOTHING), (None, None))
        if call is None or call.sources is None or outputs is None:
            return run()
        if call.function is not function:
            raise diverged(self.name, f"took another path when it ran again, {function} instead of {call.function}")
        with torch._C.DisableTorchFunction():
            values = None if _is_changed(outputs) else self._saved_by(call, given())
            for value in values or ():
                self.repack(value)
            if values is not None:
                if not outputs:
                    raise diverged(self.name, "saved more tensors in forward than when it ran again")
                # Not the leaf itself: code asks for a node (`grad_fn`), and may not write to a leaf.
                leaves = [
                    leaf.requires_grad_().view_as(leaf) if trains else leaf
                    for (leaf, _), trains in zip(outputs, call.trains, strict=True)
                ]
                return tuple(leaves) if call.is_tuple else leaves[0]
        return run()

    def _saved_by(self, call: Learned, given: Sequence[Any]) -> list[torch.Tensor] | None:
        """What a call saved, of what is given to it now; None where that lies otherwise in memory."""
        values = []
        for number, strides, cast, geometry in call.sources or ():
            if number < 0:
                values.append(self._wanted[call.own[-1 - number]][0])
                continue
            value = given[number] if number < len(given) else None
            if not isinstance(value, torch.Tensor) or (strides is not None and value.stride() != strides):
                return None
            begin = int(value.storage_offset()) if cast is None else 0
            value = value.detach() if cast is None else _cast(value, cast)
            if geometry is not None:
                size, stride, offset = geometry
                value = value.as_strided(size, stride, begin + offset)
            values.append(value)
        return values


_NOTHING: Iterator[Any] = iter(())


def frame_of(unit: str) -> KeepingFrame | None:
    """The frame of a unit whose forward this thread runs, for the first time or again. None where scopes do nothing:
    outside of a frame, and where tensors count no versions or have no memory of their own."""
    frame = _here.frame
    if frame is None or frame.name != unit or torch.is_inference_mode_enabled():
        return None
    return frame if _transform() is None and forward_ad._current_level < 0 else None


class Draft:
    """One call of ``function`` that is learned from: its ``outputs``, and the ``sources`` of what autograd saved during
    it; without these it runs again. ``own``: what it saved of its own making, by number among the unit's.
    ``is_ambiguous``: later calls may have the same tensors from elsewhere. ``saved``: how many the unit had then."""

    def __init__(self, scope: Scope, function: Any, sources: Sequence[Source] | None = None, saved: int = 0) -> None:
        self.scope, self.function, self.sources, self.saved = scope, function, sources, saved
        self.own: dict[int, tuple[torch.Tensor, int]] = {}
        self.outputs: Held = ()
        self.trains: Sequence[bool] = ()
        self.is_ambiguous = self.is_tuple = False
        self._prints: list[tuple[torch.Tensor, torch.Tensor]] = []

    def learned(self, saved: int) -> Learned:
        """This call as later ones will be, in a unit that saves so many tensors."""
        is_needed = self.sources is not None and self.saved != saved
        leaves: Sequence[int] | None = None
        if not isinstance(self.function, nn.Module):
            at = {(*layout_of(tensor), _memory(tensor)): number for number, (tensor, _) in self.own.items()}
            tensors = [leaf for leaf, _ in self.outputs if isinstance(leaf, torch.Tensor)]
            found = [at[key] for leaf in tensors if (key := (*layout_of(leaf), _memory(leaf))) in at]
            leaves = () if not is_needed else found if len(found) == len(self.outputs) else None
        own, begin = list(self.own), self.saved - len(self.sources or ())
        return Learned(
            self.scope, self.function, self.sources, own, leaves, self.trains, self.is_tuple, is_needed, begin
        )

    def look_at_memory(self) -> None:
        """Note what is in the outputs, to see whether they are written to without a new version."""
        tensors = [leaf for leaf, _ in self.outputs if isinstance(leaf, torch.Tensor) and why_not(leaf) is None]
        self._prints = [(tensor, fingerprint(tensor, form_of(tensor))) for tensor in tensors]

    def wrote_unseen(self) -> bool:
        """Whether they were, by ``.data``, NumPy, or a kernel of Triton's as Liger's rotary embedding."""
        now = [not _equal(before, fingerprint(tensor, form_of(tensor))) for tensor, before in self._prints]
        self._prints = []
        return any(now) and not _is_changed(self.outputs)


def _held(output: Any) -> Held | None:
    """None for what is neither a tensor nor a tuple."""
    if type(output) is torch.Tensor:
        return ((output.detach(), output._version),)
    if type(output) is not tuple:
        return None
    return [(leaf.detach(), leaf._version) if isinstance(leaf, torch.Tensor) else (leaf, 0) for leaf in output]


def _is_changed(outputs: Held) -> bool:
    """Whether an output was changed in place since."""
    return any([isinstance(leaf, torch.Tensor) and leaf._version != version for leaf, version in outputs])


def drafted(
    scope: Scope, function: Any, output: Any, saved: Sequence[torch.Tensor], given: Sequence[Any], count: int
) -> Draft | None:
    """What to keep of a call; None where it has to run again. ``count``: how many tensors the unit saved by now."""
    numbers: dict[Any, int] = {}
    is_shared = False
    for number, value in enumerate(given):
        if type(value) in _PLAIN and value.layout is torch.strided:
            # queries, keys and values may be parts of one memory, or one tensor
            memory, place = _memory(value), (_memory(value), value.storage_offset())
            is_shared |= place in numbers
            numbers[memory] = numbers[place] = number
    leaves: tuple[Any, ...] = output if type(output) is tuple else (output,)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or any(type(leaf) is not torch.Tensor or leaf.layout is not torch.strided for leaf in tensors):
        return None
    outputs = {_memory(leaf): leaf for leaf in tensors}
    if not numbers.keys().isdisjoint(outputs):
        return None  # it returns what it was given, which may be written to later
    own: dict[int, tuple[torch.Tensor, int]] = {}
    sources: list[Source] = []
    for nth, tensor in enumerate(saved, count - len(saved)):
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        source = _plain_source(tensor, given, numbers) if plain else _same_object(tensor, given)
        if source is None:
            if not plain:
                return None
            own[nth] = tensor.detach(), tensor._version
            source = Source(-len(own))
        sources.append(source)
    extra = {m: t.untyped_storage().nbytes() for t, _ in own.values() if (m := _memory(t)) not in outputs}
    if _OWN_SHARE * sum(extra.values()) > sum(leaf.untyped_storage().nbytes() for leaf in outputs.values()):
        return None
    draft = Draft(scope, function, sources, count)
    draft.own, draft.outputs, draft.is_tuple = own, _held(output) or (), type(output) is tuple
    draft.trains = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    draft.is_ambiguous = is_shared
    return draft


def _plain_source(tensor: torch.Tensor, given: Sequence[Any], numbers: Mapping[Any, int]) -> Source | None:
    """The source of a view of what the call was given, or of a cast of it. ``numbers``: by memory, which of these."""
    memory = _memory(tensor)
    number = numbers.get((memory, tensor.storage_offset()), numbers.get(memory))
    if number is None or (value := given[number]).dtype is not tensor.dtype:
        return _cast_source(tensor, given)
    size, strides, there = tensor.size(), tensor.stride(), value.stride()
    offset = int(tensor.storage_offset() - value.storage_offset())
    itself = not offset and strides == there and size == value.size()
    return Source(number, there, None, None if itself else (size, strides, offset))


def _same_object(tensor: torch.Tensor, given: Sequence[Any]) -> Source | None:
    """The source of quantised weights and the like, which are saved as they are."""
    return next((Source(n) for n, value in enumerate(given) if value is tensor), None)


def _cast_source(tensor: torch.Tensor, given: Sequence[Any]) -> Source | None:
    """The source of what autocast, or the call itself, cast of what it was given."""
    if not tensor.is_floating_point():
        return None
    whole = tensor if tensor._base is None else tensor._base
    others = [
        (n, value)
        for n, value in enumerate(given)
        if type(value) in _PLAIN and value.dtype is not whole.dtype
        if (value.is_floating_point() or value.dtype is torch.bool)
        if not whole._version and value.size() == whole.size() and value.requires_grad == whole.requires_grad
    ]
    if whole.requires_grad:
        others = [(n, value) for n, value in others if _is_cast_of(whole, value)]
    elif len(others) > 1:
        return None
    if not others:
        return None
    number, value = others[0]
    geometry = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    return Source(number, value.stride(), tensor.dtype, geometry)


def _is_cast_of(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    before, number = node.next_functions[0]
    if value.grad_fn is None:
        return getattr(before, "variable", None) is value
    return before == value.grad_fn and number == value.output_nr


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of it. And what attention makes of a mask."""
    if value.dtype is torch.bool:
        return torch.zeros_like(value, dtype=dtype).masked_fill_(value.logical_not(), -torch.inf)
    return value.detach().to(dtype)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with quietly():
        return torch.equal(one, other)


class FunctionScopes(TorchFunctionMode):
    """Keeps the outputs of attention functions, known by their names, and of ``others``, while it is entered."""

    def __init__(self, frame: KeepingFrame, scope: Scope, others: Collection[Any] = ()) -> None:
        super().__init__()
        self._frame, self._scope, self._others = frame, scope, others
        self._is_on = False

    def __enter__(self) -> FunctionScopes:
        if not self._frame.awaits(self._scope, self):
            self.start()
        return self

    def start(self) -> None:
        """Look at functions from here on."""
        if not self._is_on:
            self._is_on = True
            super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._is_on:
            self._is_on = False
            super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = _ATTENTION.get(func)
        if wanted is None or wanted:
            if torch.compiler.is_dynamo_compiling():  # what an attention compiles itself, flex_attention
                return func(*args, **(kwargs or {}))
            wanted = _names_attention(func)
        if not wanted and func not in self._others:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        self._scope.called = True
        if func is nn.functional.multi_head_attention_forward:  # which calls others
            with FunctionScopes(self._frame, self._scope, self._others):
                return func(*args, **kwargs)
        frame = frame_of(self._frame.name)
        if frame is None or frame is not self._frame or "out" in kwargs or _drops_out(func, args, kwargs):
            return func(*args, **kwargs)
        return frame.call(
            self._scope, func, functools.partial(func, *args, **kwargs), lambda: (*args, *kwargs.values())
        )


_ATTENTION: dict[Any, bool] = {}  # by function; looked up for each that is called


def _names_attention(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    found = "attention" in name or "attn" in name
    if len(_ATTENTION) < _MOST_FUNCTIONS:
        _ATTENTION[func] = found
    return found


def _drops_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers: skipping it would shift those behind it."""
    if func is nn.functional.scaled_dot_product_attention or "dropout_p" in kwargs:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))
    return draws_random_numbers(func, args, kwargs)  # type: ignore[arg-type]
