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
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from autockpt.checkpointing.autocast import autocast_is_on, remembered_cast
from autockpt.checkpointing.fingerprint import fingerprint, form_of, quietly, why_not
from autockpt.checkpointing.frame import CheckpointFrame, diverged
from autockpt.checkpointing.triton_kernels import READS, launches, name_of
from autockpt.devices.random_states import TorchStates

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_TRITON = "triton.runtime.jit"
_MOST_FUNCTIONS, _MOST_LEARNED = 4096, 16
_OWN_SHARE = 4  # what a call saves of its own is kept up to this part of its output
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
        self.learned: dict[Any, list[Source]] = {}  # sources of what a module saves, by what it is given

    def __reduce__(self) -> tuple[type[Scope], tuple[()]]:
        return Scope, ()  # a copy learns anew


class KeepingFrame(CheckpointFrame):
    """One call of a unit whose scopes keep outputs, and hand them out in its recomputation."""

    __slots__ = ("_handing", "kept", "name")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # by scopes and not in one row: a scope that is entered in one of the two runs only does not shift the others
        self.kept: dict[Scope, list[KeptCall | None]] | None = {}
        self._handing: dict[Scope, Iterator[KeptCall | None]] = {}
        self.name = self._unit.name

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As ``CheckpointFrame.run``."""
        if self._unit.check is not None:
            self._unit.check.in_turn = True
        outer, _here.frame = _here.frame, self
        try:
            with launches(self._launched) if _TRITON in sys.modules else nullcontext():
                output = super().run(args, kwargs)
        finally:
            _here.frame = outer
        self._forget_changed()
        return output

    def _run_again(self, inputs: list[torch.Tensor]) -> None:
        kept = self.kept or {}
        if self._live is not None:
            kept = {}  # a gradient is taken inside the forward, and its recomputation needs the whole graph
        # Each output is handed out once, and let go of with the tensors that backward gets: a later backward over the
        # same graph runs everything again.
        self.kept, self._handing = None, {scope: iter(calls) for scope, calls in kept.items()}
        outer, noted, _here.frame, self.noted = _here.frame, self.noted, self, None
        try:
            super()._run_again(inputs)
        finally:
            _here.frame, self.noted, self._handing = outer, noted, {}

    def call(self, scope: Scope, function: Any, run: Callable[[], Any], given: Sequence[Any], key: Any = None) -> Any:
        """``run()``, which calls ``function`` with what is ``given``, or what it returned in the first run.

        Calls with equal ``key`` save tensors of the same sources. None: that is not known."""
        if self.noted is not None:  # inside another scope's call
            return run()
        self.noted = []
        try:
            if self.kept is not None:
                return self._keep(scope, function, run, given, key)
            call = next(self._handing.get(scope, _NOTHING), None)
            return run() if call is None else call.instead(self, function, run, given)
        finally:
            self.noted = None

    def _keep(self, scope: Scope, function: Any, run: Callable[[], Any], given: Sequence[Any], key: Any) -> Any:
        assert self.kept is not None and self.noted is not None
        noted, checked = self.noted, self._late is not None
        if (calls := self.kept.get(scope)) is None:
            calls = self.kept[scope] = []
        place = len(calls)
        calls.append(None)  # first, for calls that fail: the unit may go on
        before = self._context.now() if checked else None
        output = run()
        if before is not None and not _same_states(before, self._context.now()):
            scope.again.add(function)
        if function in scope.again:
            return output
        sources = None if checked else scope.learned.get(key)
        with torch._C.DisableTorchFunction():
            if sources is not None and len(sources) == len(noted):
                calls[place] = KeptCall(function, output, (), sources, len(self._forms))
                return output
            calls[place] = call = kept_call(function, output, noted, given, len(self._forms))
        if call is not None and key is not None and not call.has_own:
            if len(scope.learned) >= _MOST_LEARNED:  # batches without padding have new lengths in every step
                scope.learned.clear()
            scope.learned[key] = call.sources
        if call is not None and checked and not self._unit.is_measured:
            call.look_at_memory()
        return output

    def _launched(self, kernel: Any, launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a Triton kernel: it may write to outputs that are kept, and no version tells of it."""
        reads = READS.get(name_of(kernel), ())
        storages = {
            _memory(value)
            for position, value in enumerate((*args, *kwargs.values()))
            if position not in reads and isinstance(value, torch.Tensor)
        }
        for calls in (self.kept or {}).values():
            for place, call in enumerate(calls):
                if call is not None and not storages.isdisjoint(call.storages):
                    calls[place] = None
        return launch(kernel, *args, **kwargs)

    def _forget_changed(self) -> None:
        """The forward has ended. Outputs that it changed, or after which nothing is saved, need not be held."""
        lost, saved = 0, len(self._forms)
        for scope, calls in (self.kept or {}).items():
            for place, call in enumerate(calls):
                if call is not None and call.prints is not None and call.wrote_unseen():
                    scope.again.add(call.function)
                    call = None
                if call is None or call.is_changed():
                    calls[place], lost = None, lost + 1
                elif call.saved == saved:
                    call.forget_output()
        for counts in _observers:
            counts[self.name] = counts.get(self.name, 0) + lost


_NOTHING: Iterator[Any] = iter(())


def frame_of(unit: str) -> KeepingFrame | None:
    """The frame of a unit whose forward this thread runs, for the first time or again. None where scopes do nothing:
    outside of a frame, and where tensors count no versions or have no memory of their own."""
    frame = _here.frame
    if frame is None or frame.name != unit or torch.is_inference_mode_enabled():
        return None
    return frame if _transform() is None and forward_ad._current_level < 0 else None


Source = tuple[int, tuple[int, ...] | None, torch.dtype | None, tuple[torch.Size, tuple[int, ...], int] | None]
"""Where a saved tensor comes from. First its number among what the call was given, with the strides that it has; the
call's own have negative numbers, from -1 downwards. Then what it is cast to. Last the saved tensor's size and strides,
and its offset from where that begins; None where it is that itself.

Plain tuples: one is made for each saved tensor."""


def key_of(given: Sequence[Any]) -> Any:
    """What decides which tensors a linear layer or convolution saves; None where that is not known, as under autocast.

    Not for several activations: which of them share memory decides, too."""
    if autocast_is_on():
        return None
    key: list[Any] = [torch.is_grad_enabled()]
    with torch._C.DisableTorchFunction():  # the mode around attention would be asked for every attribute
        for value in given:
            if value is not None:
                if type(value) not in _PLAIN or value.layout is not torch.strided:
                    return None
                key += (value.shape, value.stride(), value.dtype, value.requires_grad)
    return tuple(key)


class KeptCall:
    """What one call of ``function`` returned, and the sources of what autograd saved during it. ``saved``: how many
    tensors the frame had saved when it ended."""

    __slots__ = ("_outputs", "_own", "_trains", "_tuple", "_versions", "function", "prints", "saved", "sources")

    def __init__(
        self, function: Any, output: Any, own: Sequence[torch.Tensor], sources: list[Source], saved: int
    ) -> None:
        self.function, self._own, self.sources, self.saved, self.prints = function, own, sources, saved, None
        self._tuple = type(output) is tuple
        # aliases without a graph, which share their version counters
        if self._tuple:
            self._outputs = tuple([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in output])
            self._trains = tuple([isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in output])
            self._versions = tuple([leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in output])
        else:
            self._outputs, self._trains, self._versions = (
                (output.detach(),),
                (output.requires_grad,),
                (output._version,),
            )

    @property
    def has_own(self) -> bool:
        """Whether some of what it saved was of its own making."""
        return bool(self._own)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._outputs if isinstance(leaf, torch.Tensor)]

    @property
    def storages(self) -> set[int]:
        """What tells the memory of its outputs."""
        return set(map(_memory, self._tensors))

    def is_changed(self) -> bool:
        """Whether an output was changed in place since."""
        for leaf, version in zip(self._outputs, self._versions, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf._version != version:
                return True
        return False

    def look_at_memory(self) -> None:
        """Note what is in the outputs, to see whether they are written to without a new version."""
        forms = [(tensor, form_of(tensor)) for tensor in self._tensors if why_not(tensor) is None]
        self.prints = [(tensor, form, fingerprint(tensor, form)) for tensor, form in forms]

    def wrote_unseen(self) -> bool:
        """Whether they were, by ``.data``, NumPy or the like."""
        prints, self.prints = self.prints or (), None
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
        for number, strides, cast, geometry in self.sources:
            if number < 0:
                values.append(self._own[-1 - number])
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
    function: Any, output: Any, saved: Sequence[torch.Tensor], given: Sequence[Any], count: int
) -> KeptCall | None:
    """What to keep of a call; None where it has to run again."""
    numbers: dict[Any, int] = {}
    for number, value in enumerate(given):
        if type(value) in _PLAIN and value.layout is torch.strided:
            memory = value.untyped_storage()._cdata
            # queries, keys and values may be parts of one memory
            numbers[memory] = numbers[memory, value.storage_offset()] = number
    outputs: dict[int, torch.Tensor] = {}
    for leaf in output if type(output) is tuple else (output,):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
            outputs[memory := leaf.untyped_storage()._cdata] = leaf
            if memory in numbers:
                return None  # it returns what it was given, which may be written to later
        elif isinstance(leaf, torch.Tensor):
            return None
    if not outputs:
        return None
    own: list[torch.Tensor] = []
    sources: list[Source] = []
    for tensor in saved:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        memory = tensor.untyped_storage()._cdata if plain else None
        number = numbers.get((memory, tensor.storage_offset()), numbers.get(memory)) if plain else None
        if number is not None and (value := given[number]).dtype is tensor.dtype:
            size, strides, there = tensor.size(), tensor.stride(), value.stride()
            offset = int(tensor.storage_offset() - value.storage_offset())
            itself = not offset and strides == there and size == value.size()
            sources.append((number, None, None, None) if itself else (number, there, None, (size, strides, offset)))
        elif (source := _cast_source(tensor, given) if plain else _same_object(tensor, given)) is not None:
            sources.append(source)
        elif plain:
            own.append(tensor.detach())
            sources.append((-len(own), None, None, None))
        else:
            return None
    if own:
        extra = {m: t.untyped_storage().nbytes() for t in own if (m := _memory(t)) not in outputs}
        if _OWN_SHARE * sum(extra.values()) > sum(leaf.untyped_storage().nbytes() for leaf in outputs.values()):
            return None
    return KeptCall(function, output, own, sources, count)


def _same_object(tensor: torch.Tensor, given: Sequence[Any]) -> Source | None:
    """The source of quantised weights and the like, which are saved as they are."""
    return next(((n, None, None, None) for n, value in enumerate(given) if value is tensor), None)


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
    return number, value.stride(), tensor.dtype, geometry


def _is_cast_of(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    before, number = node.next_functions[0]
    if value.grad_fn is None:
        return getattr(before, "variable", None) is value
    return before == value.grad_fn and number == value.output_nr


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of it, of weights the cast that it remembers. And what attention makes of a mask."""
    if value.dtype is torch.bool:
        return torch.zeros_like(value, dtype=dtype).masked_fill_(value.logical_not(), -torch.inf)
    if type(value) is nn.Parameter and torch.is_autocast_cache_enabled():
        found = remembered_cast(value)
        if found is not None and found.dtype is dtype:
            return found
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
        return frame.call(self._scope, func, functools.partial(func, *args, **kwargs), (*args, *kwargs.values()))


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
