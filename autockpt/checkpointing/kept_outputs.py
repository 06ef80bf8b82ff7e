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
forward has ended, it must have saved tensors of the same forms as the call that was learned from. Otherwise nothing is
kept of it, and it is learned from again.
"""

from __future__ import annotations

import functools
import operator
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
from autockpt.devices.random_states import TorchStates

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_MOST_FUNCTIONS, _MOST_LAYOUTS = 4096, 16
_OWN_SHARE = 4  # what a call saves of its own is kept up to this part of its output
_transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # type: ignore[attr-defined]
_function_of = operator.attrgetter("function")
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
    """

    scope: Scope
    function: Any
    sources: Sequence[Source] | None
    own: Sequence[int]
    leaves: Sequence[int] | None
    trains: tuple[bool, ...]
    is_tuple: bool
    is_needed: bool


class Layout:
    """What calls in scopes, in order, save and return in calls of a unit that save tensors of these ``forms``."""

    def __init__(self, forms: list[Any], calls: list[Learned]) -> None:
        self.forms, self.calls = forms, calls
        self.caught = [call for call in calls if call.leaves is None]
        self.catches_functions = any(not isinstance(call.function, nn.Module) for call in self.caught)
        self.kept_numbers = {number for call in calls for number in (*call.own, *(call.leaves or ()))}


class KeepingFrame(CheckpointFrame):
    """One call of a unit whose scopes keep outputs, and hand them out in its recomputation."""

    __slots__ = ("_calls", "_handing", "_is_inside", "_key", "_layout", "name")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        assert self._live is not None
        self.name = self._unit.name
        trains = [parameter is not None and parameter.requires_grad for parameter in self._parameters]
        inputs = [(t.shape, t.dtype, t.requires_grad) for t in self._live if not t.is_nested]
        self._key = (*inputs, *trains, *self._training, self._context.autocast.key)
        self._layout: Layout | None = None if self.checked else self._unit.learned.get(self._key)
        # None once they are handed out: a later backward over the same graph runs everything again
        self._calls: list[KeptCall] | None = []
        self._handing: dict[Scope, Iterator[KeptCall]] = {}
        self._is_inside = False  # a call in a scope

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As ``CheckpointFrame.run``."""
        layout = self._layout
        if self._unit.check is not None:
            self._unit.check.in_turn = True
        if layout is not None:
            self.wanted = dict.fromkeys(layout.kept_numbers)
        outer, _here.frame = _here.frame, self
        try:
            output = super().run(args, kwargs)
        finally:
            _here.frame = outer
        if layout is None:
            if self._calls is not None:  # no gradient was taken inside the forward
                self._learn()
        elif not self._is_as_learned(layout):
            self._calls, self._layout, self.wanted = [], None, None
            self._unit.learned.pop(self._key, None)
        else:
            self._tell_of_lost([call.sources is None for call in layout.calls].count(True))
        return output

    def _is_as_learned(self, layout: Layout) -> bool:
        calls = self._calls or []
        if self._forms != layout.forms or len(calls) != len(layout.caught):
            return False
        return all(map(operator.is_, map(_function_of, calls), map(_function_of, layout.caught)))

    def watches(self, scope: Scope) -> bool:
        """Whether functions that a scope calls have to be looked at now."""
        if self._calls is None:
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
            if self._calls is None:
                call = next(self._handing.get(scope, _NOTHING), None)
                return run() if call is None or call.sources is None else call.instead(self, function, run, given())
            if self._layout is None:
                return self._learn_from(scope, function, run, given)
            output = run()
            caught, number = self._layout.caught, len(self._calls)
            learned = caught[number] if number < len(caught) else None
            call = KeptCall(scope, function, None if learned is None else learned.sources)
            self._calls.append(call)
            if learned is not None and learned.is_needed:
                if type(output) is torch.Tensor or type(output) is tuple:
                    call.hold(output)
                else:
                    call.sources = None
            return output
        finally:
            self._is_inside = False

    def _learn_from(self, scope: Scope, function: Any, run: Callable[[], Any], given: Callable[[], Any]) -> Any:
        """A call of which it is not known yet what it saves."""
        assert self._calls is not None
        place = len(self._calls)
        self._calls.append(KeptCall(scope, function))  # first, for calls that fail: the unit may go on
        before = self._context.now() if self.checked else None
        self.noted = noted = []
        try:
            output = run()
        finally:
            self.noted = None
        if before is not None and not _same_states(before, self._context.now()):
            scope.again.add(function)
        if function not in scope.again:
            with torch._C.DisableTorchFunction():
                call = kept_call(scope, function, output, noted, given(), len(self._forms))
            if call is not None and self._calls is not None:
                self._calls[place] = call
                if self.checked and not self._unit.is_measured:
                    call.look_at_memory()
        return output

    def _learn(self) -> None:
        """The forward has ended. Outputs that it changed, or after which nothing is saved, need not be held."""
        assert self._calls is not None
        saved, learned = len(self._forms), list[Learned]()
        for place, call in enumerate(self._calls):
            if call.wrote_unseen():
                call.scope.again.add(call.function)
                call.sources = None
            if call.sources is None or call.is_changed():
                call = self._calls[place] = KeptCall(call.scope, call.function)
            learned.append(call.learned(saved))
            if not learned[-1].is_needed:
                call.forget_output()
        self._tell_of_lost([call.sources is None for call in learned].count(True))
        layouts = self._unit.learned
        if not any(call.is_ambiguous for call in self._calls):
            if len(layouts) >= _MOST_LAYOUTS:  # batches without padding have new lengths in every step
                layouts.clear()
            layouts[self._key] = Layout(self._forms, learned)

    def _tell_of_lost(self, count: int) -> None:
        for counts in _observers:
            counts[self.name] = counts.get(self.name, 0) + count

    def _run_again(self, inputs: list[torch.Tensor]) -> Any:
        # where a gradient is taken inside the forward, its recomputation needs the whole graph
        calls = self._restored() if self._live is None else []
        # each output is handed out once, and let go of with the tensors that backward gets
        self._calls, self.wanted, by_scope = None, None, dict[Scope, list[KeptCall]]()
        for call in calls:
            # not in one row: a scope that is entered in one of the two runs only does not shift the others
            by_scope.setdefault(call.scope, []).append(call)
        self._handing = {scope: iter(some) for scope, some in by_scope.items()}
        outer, inside, _here.frame, self._is_inside = _here.frame, self._is_inside, self, False
        try:
            return super()._run_again(inputs)
        finally:
            _here.frame, self._is_inside, self._handing = outer, inside, {}

    def _restored(self) -> list[KeptCall]:
        """The calls in scopes: those that were caught, and those whose outputs are among the tensors they saved."""
        calls, layout, wanted = self._calls or [], self._layout, self.wanted
        if layout is None or wanted is None:
            return calls
        caught, restored = iter(calls), []
        for learned in layout.calls:
            is_caught = learned.leaves is None
            call = next(caught) if is_caught else KeptCall(learned.scope, learned.function, learned.sources)
            call.restore(learned, wanted)
            restored.append(call)
        return restored


_NOTHING: Iterator[Any] = iter(())


def frame_of(unit: str) -> KeepingFrame | None:
    """The frame of a unit whose forward this thread runs, for the first time or again. None where scopes do nothing:
    outside of a frame, and where tensors count no versions or have no memory of their own."""
    frame = _here.frame
    if frame is None or frame.name != unit or torch.is_inference_mode_enabled():
        return None
    return frame if _transform() is None and forward_ad._current_level < 0 else None


class KeptCall:
    """What one call of ``function`` returned, and the ``sources`` of what autograd saved during it; without these it
    runs again. ``own`` tensors are what it saved of its own making, ``own_at`` their numbers among the unit's."""

    __slots__ = (
        *("_outputs", "_prints", "_saved", "_trains", "_tuple", "_versions"),
        *("function", "is_ambiguous", "own", "own_at", "scope", "sources"),
    )

    def __init__(self, scope: Scope, function: Any, sources: Sequence[Source] | None = None, saved: int = 0) -> None:
        self.scope, self.function, self.sources, self._saved = scope, function, sources, saved
        self.own: Sequence[torch.Tensor] = ()
        self.own_at: Sequence[int] = ()
        self._outputs: tuple[Any, ...] = ()
        self._trains = self._versions = ()
        self._prints: list[Any] = []
        self.is_ambiguous = self._tuple = False

    def hold(self, output: Any) -> None:
        """What it returned: aliases without a graph, which share their version counters."""
        if type(output) is not tuple:
            self._outputs, self._trains = (output.detach(),), (output.requires_grad,)
            self._versions = (output._version,)
            return
        self._tuple = True
        self._outputs = tuple([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in output])
        self._trains = tuple([isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in output])
        self._versions = tuple([leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in output])

    def restore(self, learned: Learned, wanted: dict[int, Any]) -> None:
        """What it saved of its own making, and what it returned where that is among it: as the frame has kept it."""
        self.own = [wanted[number][0] for number in learned.own]
        if learned.leaves is not None:
            leaves = [wanted[number] for number in learned.leaves]
            self._outputs, self._versions = tuple([leaf for leaf, _ in leaves]), tuple([v for _, v in leaves])
            self._trains, self._tuple = learned.trains, learned.is_tuple

    def learned(self, saved: int) -> Learned:
        """This call as later ones will be, in a unit that saves so many tensors."""
        at = {(*layout_of(tensor), _memory(tensor)): n for tensor, n in zip(self.own, self.own_at, strict=True)}
        tensors = all(isinstance(leaf, torch.Tensor) for leaf in self._outputs)
        found = [at.get((*layout_of(leaf), _memory(leaf))) for leaf in self._outputs] if tensors and at else [None]
        is_needed = self.sources is not None and self._saved != saved
        leaves: Sequence[int] | None = None if None in found else found  # type: ignore[assignment]
        if isinstance(self.function, nn.Module):
            leaves = None
        elif not is_needed:
            leaves = ()
        return Learned(
            self.scope, self.function, self.sources, self.own_at, leaves, self._trains, self._tuple, is_needed
        )

    def is_changed(self) -> bool:
        """Whether an output was changed in place since."""
        for leaf, version in zip(self._outputs, self._versions, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf._version != version:
                return True
        return False

    def look_at_memory(self) -> None:
        """Note what is in the outputs, to see whether they are written to without a new version."""
        tensors = [leaf for leaf in self._outputs if isinstance(leaf, torch.Tensor) and why_not(leaf) is None]
        self._prints = [(tensor, form := form_of(tensor), fingerprint(tensor, form)) for tensor in tensors]

    def wrote_unseen(self) -> bool:
        """Whether they were, by ``.data``, NumPy, a kernel of Triton's or the like."""
        prints, self._prints = self._prints, []
        return not self.is_changed() and any(
            not _equal(before, fingerprint(tensor, form)) for tensor, form, before in prints
        )

    def forget_output(self) -> None:
        """The recomputation ends as soon as what this call saved is filled in."""
        self._outputs = self._versions = ()

    def instead(self, frame: KeepingFrame, function: Any, run: Callable[[], Any], given: Sequence[Any]) -> Any:
        """What the call returned, once all that it saved is filled in. ``run()`` where it cannot be skipped.

        Raises ConflictError where the unit calls another function in its place.
        """
        if self.function is not function:
            raise diverged(frame.name, f"took another path when it ran again, {function} instead of {self.function}")
        with torch._C.DisableTorchFunction():
            values = None if self.is_changed() else self._values(given)
            for value in values or ():
                frame.repack(value)
            if values is not None:
                return self._again(frame.name)
        return run()

    def _again(self, unit: str) -> Any:
        if not self._outputs:
            raise diverged(unit, "saved more tensors in forward than when it ran again")
        # Not the leaf itself: code asks for a node (`grad_fn`), and may not write to a leaf.
        leaves = [
            leaf.requires_grad_().view_as(leaf) if trains else leaf
            for leaf, trains in zip(self._outputs, self._trains, strict=True)
        ]
        return tuple(leaves) if self._tuple else leaves[0]

    def _values(self, given: Sequence[Any]) -> list[torch.Tensor] | None:
        """What the call saved, of what is given to it now; None where that lies otherwise in memory."""
        values = []
        for number, strides, cast, geometry in self.sources or ():
            if number < 0:
                values.append(self.own[-1 - number])
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


def kept_call(
    scope: Scope, function: Any, output: Any, saved: Sequence[torch.Tensor], given: Sequence[Any], count: int
) -> KeptCall | None:
    """What to keep of a call; None where it has to run again. ``count``: how many tensors the unit saved by now."""
    numbers: dict[Any, int] = {}
    is_shared = False
    for number, value in enumerate(given):
        if type(value) in _PLAIN and value.layout is torch.strided:
            # queries, keys and values may be parts of one memory, or one tensor
            memory, place = _memory(value), (_memory(value), value.storage_offset())
            is_shared |= place in numbers
            numbers[memory] = numbers[place] = number
    outputs: dict[int, torch.Tensor] = {}
    for leaf in output if type(output) is tuple else (output,):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
            outputs[memory := _memory(leaf)] = leaf
            if memory in numbers:
                return None  # it returns what it was given, which may be written to later
        elif isinstance(leaf, torch.Tensor):
            return None
    if not outputs:
        return None
    own: list[torch.Tensor] = []
    own_at: list[int] = []
    sources: list[Source] = []
    for nth, tensor in enumerate(saved):
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        memory = _memory(tensor) if plain else None
        number = numbers.get((memory, tensor.storage_offset()), numbers.get(memory)) if plain else None
        if number is not None and (value := given[number]).dtype is tensor.dtype:
            size, strides, there = tensor.size(), tensor.stride(), value.stride()
            offset = int(tensor.storage_offset() - value.storage_offset())
            itself = not offset and strides == there and size == value.size()
            sources.append(Source(number, there, None, None if itself else (size, strides, offset)))
        elif (source := _cast_source(tensor, given) if plain else _same_object(tensor, given)) is not None:
            sources.append(source)
        elif plain:
            own.append(tensor.detach())
            own_at.append(count - len(saved) + nth)
            sources.append(Source(-len(own)))
        else:
            return None
    if own:
        extra = {m: t.untyped_storage().nbytes() for t in own if (m := _memory(t)) not in outputs}
        if _OWN_SHARE * sum(extra.values()) > sum(leaf.untyped_storage().nbytes() for leaf in outputs.values()):
            return None
    call = KeptCall(scope, function, sources, count)
    call.hold(output)
    call.own, call.own_at, call.is_ambiguous = own, own_at, is_shared
    return call


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
    with quietly(), torch._C.DisableTorchFunction():
        return torch.equal(one, other)


def _same_states(one: TorchStates, other: TorchStates) -> bool:
    return all(map(_equal, one.tensors, other.tensors))


class FunctionScopes(TorchFunctionMode):
    """Keeps the outputs of attention functions, known by their names, and of ``others``, while it is entered."""

    def __init__(self, frame: KeepingFrame, scope: Scope, others: Collection[Any] = ()) -> None:
        super().__init__()
        self._frame, self._scope, self._others = frame, scope, others

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
            with self:
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


def _drops_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it draws random numbers: skipping it would shift those behind it."""
    position = 4 if func is nn.functional.scaled_dot_product_attention else _dropout_position(func)
    return bool(kwargs.get("dropout_p", args[position] if position is not None and position < len(args) else 0))


@functools.lru_cache(4096)
def _dropout_position(func: Any) -> int | None:
    schema = getattr(func, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index("dropout_p") if "dropout_p" in names else None
