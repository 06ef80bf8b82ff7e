"""Keep the outputs of some calls inside a unit, and return them where the unit's forward is recomputed.

A call, of a module or of a function, need not run again if three things are known of it: what it returned, how many
tensors autograd saved during it, and where each of these comes from. Most come from what the call was given: an input
or a weight, a view of one, or autocast's cast of one. A recomputation has all of these, too. The others are the call's
own, such as attention's sums of exponentials, and are kept with the output. So the recomputation skips the call: it
fills the frame's next numbers with these tensors, in their order, and goes on with the output. The graph behind the
output is missing then. That only matters to a unit that takes a gradient inside its forward: all of it runs again.

No op is watched: a scope is an ordinary call around a module's forward, or a function mode around modules that call
attention functions. What cannot be skipped runs again: calls whose output the unit changes in place, that draw random
numbers, or that save more of their own than a quarter of their output.

Where saved tensors come from is learned in the first calls (``CallPattern``). In later calls of equal arguments a scope
does no more than hold its output, and attention runs without a mode: its output is among the tensors that it saves.
When the forward has ended, it must have saved tensors of the same sizes as the call that was learned from. Otherwise
nothing is kept of it, and it is learned from again.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from autockpt.checkpointing.fingerprint import PLAIN, fingerprint, layout_of, quietly, why_not
from autockpt.checkpointing.frame import ALL, CheckpointFrame, diverged
from autockpt.checkpointing.module_state import Entry
from autockpt.checkpointing.op_table import draws_random_numbers
from autockpt.checkpointing.replay_context import current_transform
from autockpt.checkpointing.unit import CheckpointedUnit

_MOST_PATTERNS = 16
_OWN_SHARE = 4  # what a call saves of its own is kept up to this part of its output
_type_of = operator.attrgetter("shape", "dtype", "requires_grad")
_here = threading.local()


class Scope:
    """Where calls are kept, in all calls of a unit: one of its modules, or with ``functions`` those and attention where
    the module calls them."""

    def __init__(self, functions: frozenset[Any] | None) -> None:
        self.functions = functions
        # modules or functions that were seen to draw random numbers, or to change what they are given
        self.again: set[Any] = set()
        self.called = bool(functions)  # one of them, in a checked call; experts may not be called at first

    def __reduce__(self) -> tuple[type[Scope], tuple[Any, ...]]:
        return Scope, (self.functions,)  # a copy learns again


class Origin(NamedTuple):
    """Where a saved tensor comes from.

    - ``number``: of what the call was given, which it is; the call's own have negative numbers, from -1 downwards.
    - ``strides``: those of what was given.
    - ``cast``: to which type it is cast.
    - ``geometry``: size, strides and offset of the saved tensor within what was given; None where it is that itself.
    """

    number: int
    strides: tuple[int, ...] | None = None
    cast: torch.dtype | None = None
    geometry: tuple[torch.Size, tuple[int, ...], int] | None = None


class KeptCall:
    """One call in a scope, as later ones will be.

    - ``begin``, ``end``: how many tensors the unit had saved before it, and after it; ``place``: its place among the
      calls that are followed.
    - ``origins``: where each tensor that it saves comes from; None where it runs again.
    - ``own``: the numbers of the saved tensors that it made itself.
    - ``leaves``: which of these it returns, one for each tensor of its output; None where it returns others, and its
      output has to be caught. ``trains``: which tensors of its output require a gradient.
    - ``is_needed``: the unit saves more after it. ``is_ambiguous``: later calls may have such tensors from elsewhere.
    - ``outputs``, ``saved`` (its own tensors): there until the forward that it is learned from has ended.
    """

    def __init__(self, scope: Scope, function: Any, begin: int) -> None:
        self.scope, self.function, self.begin, self.end, self.place = scope, function, begin, begin, -1
        self.forget()
        self.is_ambiguous = False

    def forget(self) -> None:
        """It runs again."""
        self.origins: list[Origin] | None = None
        self.own: list[int] = []
        self.leaves: list[int] | None = None
        self.trains: list[bool] = []
        self.is_tuple = self.is_needed = False
        self.saved: dict[int, tuple[torch.Tensor, int]] = {}
        self.outputs: Output = ()
        self._prints: list[tuple[torch.Tensor, torch.Tensor]] = []

    def learn(self, output: Any, saved: Sequence[torch.Tensor], given: Sequence[Any]) -> None:
        """It was ``given`` this, and returned ``output``. Nothing is learned where it has to run again."""
        numbers: dict[Any, int] = {}
        for number, value in enumerate(given):
            if type(value) in PLAIN and value.layout is torch.strided:
                # queries, keys and values may be parts of one memory, or one tensor
                memory, place = _memory(value), (_memory(value), value.storage_offset())
                self.is_ambiguous |= place in numbers
                numbers[memory] = numbers[place] = number
        leaves: tuple[Any, ...] = output if type(output) is tuple else (output,)
        if not leaves or any(type(leaf) is not torch.Tensor or leaf.layout is not torch.strided for leaf in leaves):
            return
        outputs = {_memory(leaf): leaf for leaf in leaves}
        if not numbers.keys().isdisjoint(outputs):
            return  # it returns what it was given, which may be written to later
        own: dict[int, tuple[torch.Tensor, int]] = {}
        origins: list[Origin] = []
        for nth, tensor in enumerate(saved, self.begin):
            plain = type(tensor) in PLAIN and tensor.layout is torch.strided
            if plain:
                origin = _plain_origin(tensor, given, numbers)
            else:  # quantised weights and the like are saved as they are
                origin = next((Origin(number) for number, value in enumerate(given) if value is tensor), None)
            if origin is None:
                if not plain:
                    return
                own[nth] = tensor.detach(), tensor._version
                origin = Origin(-len(own))
            origins.append(origin)
        extra = {m: t.untyped_storage().nbytes() for t, _ in own.values() if (m := _memory(t)) not in outputs}
        if _OWN_SHARE * sum(extra.values()) > sum(leaf.untyped_storage().nbytes() for leaf in outputs.values()):
            return
        self.origins, self.saved, self.own = origins, own, list(own)
        self.outputs, self.is_tuple = _held(output) or (), type(output) is tuple
        self.trains = [leaf.requires_grad for leaf in leaves]

    def look_at_memory(self) -> None:
        """Note what is in the outputs, to see whether they are written to without a new version."""
        self._prints = [(leaf, fingerprint(leaf)) for leaf, _ in self.outputs if why_not(leaf) is None]

    def settle(self, saved: int) -> None:
        """The unit's forward has ended, and saved so many tensors."""
        changed = any(leaf._version != version for leaf, version in self.outputs)
        if not changed and any(not have_equal_values(before, fingerprint(t)) for t, before in self._prints):
            self.scope.again.add(self.function)  # by ``.data``, NumPy, or a kernel of Triton's as Liger's rotary one
            changed = True
        if changed:
            self.forget()
        self._prints = []
        self.is_needed = self.origins is not None and self.begin + len(self.origins) != saved
        if not isinstance(self.function, nn.Module):
            at = {(*layout_of(tensor), _memory(tensor)): number for number, (tensor, _) in self.saved.items()}
            found = [at[key] for leaf, _ in self.outputs if (key := (*layout_of(leaf), _memory(leaf))) in at]
            self.leaves = [] if not self.is_needed else found if len(found) == len(self.outputs) else None


class CallPattern:
    """What ``calls`` in scopes, in order, save and return in calls of a unit that save tensors of these ``sizes``.

    Of later calls of the unit those are ``followed`` whose output has to be caught, and all others that are met on the
    way to them.
    """

    def __init__(self, sizes: list[int], calls: list[KeptCall]) -> None:
        self.sizes, self.calls = sizes, calls
        modules = [call for call in calls if isinstance(call.function, nn.Module)]
        self.catches_functions = any(call.leaves is None for call in calls if call not in modules)
        self.followed = calls if self.catches_functions else modules
        for place, call in enumerate(self.followed):
            call.place = place
        self.spans = [(call.function, call.begin, call.end) for call in self.followed]
        self.holds = [call.is_needed and call.leaves is None for call in self.followed]
        self.kept_numbers = {number for call in calls for number in (*call.own, *(call.leaves or ()))}


Output = Sequence[tuple[torch.Tensor, int]]
"""An output: aliases of its tensors without a graph, which share their version counters, with their versions."""


class KeepingFrame(CheckpointFrame):
    """One call of a unit whose scopes keep outputs, and return them in its recomputation.

    What it keeps is ``_caught``, outputs of calls, and ``_wanted``, saved tensors by their number. Both depend
    on the ``_pattern``, which is learned from ``_learning`` where it is not known yet. A frame learns or follows in its
    forward, and replays from its first recomputation on:

    ======  ==================  =====  ========================  =================================  ==================
    state   begins with         _row   _caught                   _wanted                            _noted
    ======  ==================  =====  ========================  =================================  ==================
    learn   no ``_pattern``     None   filled when forward ends  filled when forward ends           a list in each call
    follow  a known one         None   an entry for each call    known numbers, filled when saved   None
    replay  a recomputation     list   empty: it is in ``_row``  until the recomputation ends       None
    ======  ==================  =====  ========================  =================================  ==================

    A forward that does not do what its pattern says keeps nothing: its recomputation runs every call again, and so does
    every recomputation after the first.
    """

    __slots__ = (
        *("_caught", "_is_inside", "_key", "_last", "_learning", "_next", "_noted", "_pattern", "_row", "_spans"),
        *("_wanted", "mode"),
    )

    def __init__(self, unit: CheckpointedUnit, *given: Any, **named: Any) -> None:
        super().__init__(unit, *given, **named)
        inputs = [_type_of(tensor) for tensor in self._live or () if not tensor.is_nested]
        trains = [parameter is not None and parameter.requires_grad for parameter in self._parameters]
        self._key = (*inputs, *trains, *self._training, self._context.autocast.key)
        self._pattern: CallPattern | None = None if self._unchecked is not None else unit.learned.get(self._key)
        self._caught: list[Output | None] = []
        self._spans: list[tuple[Any, int, int]] = []  # function, begin and end of each call that is caught
        self._learning: list[KeptCall] = []
        self._noted: list[torch.Tensor] | None = None  # what is saved in a call that is learned from
        self._wanted: dict[int, Any] = {}
        # From the first recomputation on. Outputs are returned once: a later backward recomputes everything.
        self._row: list[tuple[KeptCall, Output | None]] | None = None
        self._next = 0  # in the row
        self._last: tuple[Any, Any, Any] = None, None, None  # a tensor, a geometry, and the view of it that was made
        self._is_inside = False  # a call in a scope
        self.mode: FunctionScopes | None = None  # is to be entered when ``_until`` is reached
        if self._pattern is not None:
            self._wanted = dict.fromkeys(self._pattern.kept_numbers)
        if self._looked_at is not ALL:
            self._looked_at = ALL if self._pattern is None else {*self._wanted, *self._looked_at}

    # In forward.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As ``CheckpointFrame.run``."""
        outer, _here.frame = getattr(_here, "frame", None), self
        try:
            output = super().run(args, kwargs)
        finally:
            _here.frame = outer
        pattern = self._pattern
        if self._row is not None:  # a gradient was taken inside the forward
            self._learning = []
        elif pattern is None:
            self._pattern = self._learn()
        elif self._sizes != pattern.sizes or self._spans != pattern.spans:
            self._pattern, self._caught, self._wanted = None, [], {}
            self._unit.learned.pop(self._key, None)
        self._spans = []
        return output

    def function_mode(self, scope: Scope) -> FunctionScopes | None:
        """The mode to enter around a scope that calls functions; None where none of them has to be looked at now.

        In a recomputation it starts when the tensors before the first that is returned are there: it costs as much as
        a small op for every function.
        """
        if self._row is None:
            pattern, learns = self._pattern, scope.called or self._unchecked is not None
            return FunctionScopes(self, scope) if (learns if pattern is None else pattern.catches_functions) else None
        for place in range(self._next, len(self._row)):
            call = self._row[place][0]
            if call.scope is scope and call.origins is not None:
                mode = FunctionScopes(self, scope)
                if call.begin > self._filled and self.mode is None and not _get_current_function_mode_stack():
                    self._until, self.mode, mode.first = call.begin, mode, place
                return mode
        return None

    def call(
        self, scope: Scope, function: Any, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """``forward(*args, **kwargs)``, which is a call of ``function``, or what it returned in the first run."""
        if self._is_inside:
            return forward(*args, **kwargs)
        if self._row is None and (pattern := self._pattern) is not None:
            caught, spans = self._caught, self._spans
            place, begin = len(caught), len(self._sizes)
            output = forward(*args, **kwargs)
            held = _held(output) if place < len(pattern.holds) and pattern.holds[place] else ()
            # in the place of calls inside of this one
            caught[place:], spans[place:] = (held,), ((function, begin, len(self._sizes)),)
            return output
        self._is_inside = True
        try:
            if self._row is None:
                return self._learn_from(scope, function, forward, args, kwargs)
            output = self._kept_output(scope, function, args, kwargs)
            return forward(*args, **kwargs) if output is None else output
        finally:
            self._is_inside = False

    def _look_at(self, number: int, tensor: torch.Tensor) -> None:
        if self._noted is not None:
            self._noted.append(tensor)
        if number in self._wanted:
            self._wanted[number] = tensor.detach(), tensor._version
        super()._look_at(number, tensor)

    def _learn_from(
        self, scope: Scope, function: Any, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A call of which it is not known yet what it saves."""
        call = KeptCall(scope, function, len(self._sizes))
        self._learning.append(call)  # first, for calls that fail: the unit may go on
        before = self._context.now() if self._unchecked is not None else None
        plain = (v for v in _given(function, args, kwargs) if type(v) in PLAIN and not v.is_inference())
        given = [(value, value._version) for value in plain]
        self._noted = noted = []
        try:
            output = forward(*args, **kwargs)
        finally:
            self._noted, call.end = None, len(self._sizes)
        draws = before is not None and not all(map(have_equal_values, before.tensors, self._context.now().tensors))
        if draws or any(value._version != version for value, version in given):
            scope.again.add(function)
        if function not in scope.again:
            with torch._C.DisableTorchFunction():
                call.learn(output, noted, _given(function, args, kwargs))
            if self._unchecked is not None and not self._unit.check.sentinels.in_mid_training:
                call.look_at_memory()
        return output

    def _learn(self) -> CallPattern:
        """The forward has ended. Outputs that it changed, or after which nothing is saved, need not be held."""
        calls, self._learning = self._learning, []
        for call in calls:
            call.settle(len(self._sizes))
            self._wanted |= call.saved
        pattern, patterns = CallPattern(self._sizes, calls), self._unit.learned
        pairs = zip(pattern.followed, pattern.holds, strict=True)
        self._caught = [call.outputs if holds else () for call, holds in pairs]
        for call in calls:
            call.outputs, call.saved = (), {}
        if not any(call.is_ambiguous for call in calls if call.origins is not None):
            if len(patterns) >= _MOST_PATTERNS:  # batches without padding have new lengths in every step
                patterns.clear()
            patterns[self._key] = pattern
        return pattern

    # In backward.

    def _run_again(self, inputs: list[torch.Tensor], exchanged: Sequence[Entry]) -> Any:
        # where a gradient is taken inside the forward, its recomputation needs the whole graph
        calls = self._pattern.calls if self._pattern is not None and self._live is None else ()
        caught, wanted = self._caught, self._wanted
        # let go of with the tensors that backward gets
        self._row = [
            (call, caught[call.place] if call.leaves is None else [wanted[number] for number in call.leaves])
            for call in calls
        ]
        self._pattern, self._caught, self._next = None, [], 0
        inside, self._is_inside, outer, _here.frame = self._is_inside, False, getattr(_here, "frame", None), self
        try:
            return super()._run_again(inputs, exchanged)
        finally:
            _here.frame, self._is_inside, self._row, self._wanted, self.mode = outer, inside, [], {}, None
            self._last = None, None, None

    def _reached(self) -> None:
        self._until, mode = len(self._sizes), self.mode
        if self._filled == self._until:
            super()._reached()
        # inside of a mode of the unit's own it would end in another order than it began: attention then runs again
        elif mode is not None and not _get_current_function_mode_stack():
            self._next = mode.first  # past calls that the mode has not seen
            mode.start()

    def _kept_output(self, scope: Scope, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the call returned, once all that it saved is filled in. None where it cannot be skipped.

        Raises ConflictError where the unit calls another function in its place.
        """
        row = self._row or []
        for place in range(self._next, len(row)):
            call, outputs = row[place]
            if call.scope is scope:
                break
        else:
            return None  # a scope that is entered in one of the two runs only does not shift the others
        self._next = place + 1
        if call.origins is None or outputs is None:
            return None
        for leaf, version in outputs:
            if leaf._version != version:
                return None
        if call.function is not function or call.begin != self._filled:
            raise diverged(self.name, f"took another path when it ran again, {function} instead of {call.function}")
        with torch._C.DisableTorchFunction():
            given, values = _given(function, args, kwargs), list[torch.Tensor]()
            for number, strides, cast, geometry in call.origins:
                if number < 0:
                    values.append(self._wanted[call.own[-1 - number]][0])
                    continue
                value = given[number] if number < len(given) else None
                if not isinstance(value, torch.Tensor) or (strides is not None and value.stride() != strides):
                    return None  # it lies otherwise in memory
                same, view, made = self._last
                if value is not same or geometry != view or cast is not None:
                    made = value.detach() if cast is None else _cast(value, cast)
                    if geometry is not None:
                        offset = int(made.storage_offset()) + geometry[2]
                        made = made.as_strided(geometry[0], geometry[1], offset)
                    if number == 0 and cast is None:
                        self._last = value, geometry, made  # what the next call may be given, too
                values.append(made)
            for value in values:
                self.repack(value)
            if not outputs:
                raise diverged(self.name, "saved more tensors in forward than when it ran again")
            # Not the leaf itself: code asks for a node (`grad_fn`), and may not write to a leaf.
            leaves = [
                leaf.requires_grad_().view_as(leaf) if trains else leaf
                for (leaf, _), trains in zip(outputs, call.trains, strict=True)
            ]
            return tuple(leaves) if call.is_tuple else leaves[0]


def _given(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that a call may read, and save."""
    if not isinstance(function, nn.Module):
        return (*args, *kwargs.values())
    weights, fields = function._parameters, function.__dict__
    # FSDP shards it, or a hook computes it, as for spectral norms
    more = [] if "weight" in weights else [fields[name] for name in ("weight", "bias") if name in fields]
    return (*args, *kwargs.values(), *weights.values(), *more)


def frame_of(unit: str) -> KeepingFrame | None:
    """The frame of a unit whose forward this thread runs, for the first time or again. None where scopes do nothing:
    outside of a frame, and where tensors count no versions or have no memory of their own."""
    frame: KeepingFrame | None = getattr(_here, "frame", None)
    if frame is None or frame.name != unit or torch.is_inference_mode_enabled():
        return None
    return frame if current_transform() is None and forward_ad._current_level < 0 else None


def _held(output: Any) -> Output | None:
    """None for what is neither a tensor nor a tuple of some."""
    if type(output) is torch.Tensor:
        return ((output.detach(), output._version),)
    if type(output) is not tuple or any(type(leaf) is not torch.Tensor for leaf in output):
        return None
    return [(leaf.detach(), leaf._version) for leaf in output]


def _plain_origin(tensor: torch.Tensor, given: Sequence[Any], numbers: Mapping[Any, int]) -> Origin | None:
    """The origin of a view of what the call was given, or of a cast of it. ``numbers``: by memory, which of these."""
    memory = _memory(tensor)
    number = numbers.get((memory, tensor.storage_offset()), numbers.get(memory))
    if number is None or (value := given[number]).dtype is not tensor.dtype:
        return _cast_origin(tensor, given)
    size, strides, there = tensor.size(), tensor.stride(), value.stride()
    offset = int(tensor.storage_offset() - value.storage_offset())
    itself = not offset and strides == there and size == value.size()
    return Origin(number, there, None, None if itself else (size, strides, offset))


def _cast_origin(tensor: torch.Tensor, given: Sequence[Any]) -> Origin | None:
    """The origin of what autocast, or the call itself, cast of what it was given."""
    if not tensor.is_floating_point():
        return None
    whole = tensor if tensor._base is None else tensor._base
    others = [
        (n, value)
        for n, value in enumerate(given)
        if type(value) in PLAIN and value.dtype is not whole.dtype
        if (value.is_floating_point() or value.dtype is torch.bool)
        if not whole._version and value.size() == whole.size() and value.requires_grad == whole.requires_grad
    ]
    if whole.requires_grad:
        others = [(n, value) for n, value in others if _is_cast_of(whole, value)]
    if not others or (len(others) > 1 and not whole.requires_grad):
        return None
    number, value = others[0]
    # of one without a graph nothing but its values tells it from something else, as a rounded input
    if not whole.requires_grad and why_not(whole) is None and not have_equal_values(whole, _cast(value, whole.dtype)):
        return None
    geometry = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    return Origin(number, value.stride(), tensor.dtype, geometry)


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


def have_equal_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    with quietly():
        return torch.equal(one, other)


class FunctionScopes(TorchFunctionMode):
    """Keeps the outputs of attention functions, known by their names, and of the scope's, while it is entered.
    ``first`` in the frame's row is the call that it waits for."""

    def __init__(self, frame: KeepingFrame, scope: Scope) -> None:
        super().__init__()
        self._frame, self._scope = frame, scope
        self._is_on, self.first = False, 0

    def __enter__(self) -> FunctionScopes:
        if self._frame.mode is not self:  # which waits until it is needed
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
        elif self._frame.mode is self:
            self._frame.mode = None  # what it waited for did not come

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # what an attention compiles itself, flex_attention
            return func(*args, **(kwargs or {}))
        if not _names_attention(func) and func not in (self._scope.functions or ()):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        self._scope.called = True
        if func is nn.functional.multi_head_attention_forward:  # which calls others
            if _get_current_function_mode_stack() or not PLAIN.issuperset(types):
                return func(*args, **kwargs)  # it asks these, too, so what it calls runs again
            with FunctionScopes(self._frame, self._scope):
                return _without_its_question(func)(*args, **kwargs)
        frame = frame_of(self._frame.name)
        if frame is None or frame is not self._frame or "out" in kwargs or draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        return frame.call(self._scope, func, func, args, kwargs)


def _without_its_question(function: Any) -> Any:
    """A function of PyTorch's, written in Python, that does not ask first for a mode to hand the call to."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


@functools.lru_cache(4096)
def _names_attention(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return "attention" in name or "attn" in name
