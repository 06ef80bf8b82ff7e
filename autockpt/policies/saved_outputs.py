"""Outputs that one forward of a unit keeps, and hands out when that forward runs again.

Works below autograd: the second forward builds its graph as usual, only the kernels of kept ops are not executed. The
dispatch mode that does this costs host time for every op it sees, so it is entered around the modules in question only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodWrapperType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from autockpt.checkpointing.fingerprint import Geometry, geometry_of
from autockpt.checkpointing.frame import diverged
from autockpt.checkpointing.op_table import (
    LIGHT_FUNCTIONS,
    draws_random_numbers,
    is_attention,
    is_heavy,
    kind_of,
    writes_to_given,
)
from autockpt.policies import products
from autockpt.policies.attachment import Attachment, call_inner, current_transform
from autockpt.policies.base import interned, setting
from autockpt.policies.casts import TO_COPY
from autockpt.policies.compiling import run_as_it_is
from autockpt.policies.replay import Replay, ReplayState
from autockpt.policies.rerun_state.reach import Node, changed_of
from autockpt.policies.rerun_state.surroundings import user_modes
from autockpt.policies.rerun_state.tensors import TENSORS
from autockpt.policies.saved import address_of
from autockpt.policies.triton_kernels import READS, launches, name_of
from autockpt.policies.user_checkpoint import hooks_in_force
from autockpt.policies.watching import CHANGED_BY_WATCHING, Watching, count_writes, passes_by, refuse_watching

Place = tuple[int, int, int]
_current = threading.local()
_LEAF = tree_structure(0)


class _Output:
    """What one op returned. Its tensors are aliases without a graph, which share their version counters."""

    watched: tuple[torch.Tensor, ...] = ()
    _versions: tuple[int, ...] = ()

    def __init__(self, func: Any, out: Any) -> None:
        leaves, self._form = ([out], _LEAF) if type(out) is torch.Tensor else tree_flatten(out)
        self.func, self.spoilt = func, False
        self._leaves = tuple(map(alias, leaves))
        self._look_at(tuple(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)))

    def _look_at(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.watched += tensors
        self._versions += tuple(tensor._version for tensor in tensors)

    def watch(self, out: Any) -> None:
        """Look out for changes by way of ``out`` too, which shares memory and no version counter with the output."""
        self._look_at(tuple(alias(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)))

    def addresses(self) -> set[int | None]:
        """What identifies its tensors' memory, for as long as this lives."""
        return set(map(address_of, self.watched)) - {None}

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since, or may have been by a kernel that leaves no trace."""
        return self.spoilt or tuple(tensor._version for tensor in self.watched) != self._versions

    def again(self) -> Any:
        return tree_unflatten([alias(leaf) for leaf in self._leaves], self._form)


class _Whole(_Output):
    """All that one call of a function did: what it returned and what autograd saved of it.

    ``saved`` are layouts of sources; of these ``made`` are the function's own. In a second run, whose graph is there
    for its saved tensors only, these are saved once more and the function is not called.
    """

    def __init__(
        self, key: Any, out: torch.Tensor, saved: tuple[tuple[products.Source, Geometry], ...], made: list[torch.Tensor]
    ) -> None:
        self.func, self._key, self._trains, self.spoilt = key[0], interned(key), out.requires_grad, False
        self._leaves = (out.detach(), *made)
        self._look_at(self._leaves)
        self._saved = interned(saved)

    def instead(self, key: Any, given: Sequence[Any], unit: str) -> torch.Tensor | None:
        """What the function returned, for a call of the unit that is given the same; None where it must be called.

        Raises ConflictError where autocast has other casts.
        """
        hooks = hooks_in_force(False)
        if hooks is None or key != self._key:
            return None
        for (number, cast), geometry in self._saved:
            source = given[number] if number >= 0 else self._leaves[-number]
            source = source if cast is None else products.cast_again(source, cast, unit)
            same = geometry_of(source) == geometry
            hooks[0](source if same else source.detach().as_strided(*geometry))
        out = self._leaves[0]
        return out.requires_grad_().view_as(out) if self._trains else out


def alias(leaf: Any) -> Any:
    """The same memory under a tensor of its own, without a graph, that shares the version counter.

    Below autograd views do not share it by themselves, and a change in place would go unnoticed.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


_observers: list[dict[str, int]] = []


@contextmanager
def given_up() -> Iterator[dict[str, int]]:
    """Counts, by unit, the outputs that were to be kept and could not be, because they were changed in place."""
    counts: dict[str, int] = {}
    _observers.append(counts)
    try:
        yield counts
    finally:
        _observers[:] = [other for other in _observers if other is not counts]


class CallOutputs:
    """Kept outputs of one call of a unit, by the order in which its scopes are entered and their functions and ops run.

    An output that is changed in place is not handed out: its op runs again. ``whole``: functions may be left out as a
    whole in the second run; not where a gradient is taken inside of it, which needs the graph. ``unseen``: the unit's
    code may change outputs without their version counters telling, so that their fingerprints are compared.
    """

    def __init__(self, unit: str, *, unseen: bool) -> None:
        self.unit, self._unseen = unit, unseen
        self.recording = self.whole = True
        self._outputs: dict[Place, _Output] = {}
        self._by_address: dict[int | None, _Output] = {}
        self._taken: list[tuple[_Output, Node]] = []
        self.scopes = 0
        self.inside = False  # a function that is watched runs: what is around it does not look at it, too

    @contextmanager
    def running(self, *, recording: bool) -> Iterator[None]:
        """The unit's forward runs, for the first time or again; the latter also in the middle of the first."""
        before = self.recording, self.scopes, self.inside
        self.recording, self.scopes, self.inside = recording, 0, False
        try:
            with setting(_current, "frame", self), launches(self.launched) if recording else nullcontext():
                yield
        finally:
            self.recording, self.scopes, self.inside = before

    def keep(self, place: Place, output: _Output) -> None:
        self._outputs[place] = output
        for tensor in output.watched if self._unseen else ():
            self._taken.append((output, Node("", tensor, TENSORS, TENSORS.take(tensor, close=True, most=0))))
        self._by_address |= dict.fromkeys(output.addresses(), output)

    def watch(self, source: Any, out: Any) -> None:
        """``out`` is a view of ``source`` of which autograd knows nothing."""
        if (output := self._by_address.get(address_of(source))) is not None:
            output.watch(out)

    def launched(self, kernel: Any, launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a Triton kernel: what it writes to, and is kept of the first forward, may be another then."""
        reads = READS.get(name_of(kernel), ())
        for position, value in enumerate((*args, *kwargs.values()) if self.recording else ()):
            if position not in reads and (output := self._by_address.get(address_of(value))) is not None:
                output.spoilt = True
        return launch(kernel, *args, **kwargs)

    def take(self, place: Place, func: Any) -> _Output | None:
        """What the op at this place returned; None where it must run again: its output was changed in place, or handed
        out before, in an earlier backward."""
        number, function, op = place
        other = self._outputs.get((number, function, 0)) if op == 1 else None
        output = other or self._outputs.pop(place, None)
        if output is not None and output.func is not func:
            raise diverged(self.unit, f"took another path when it ran again, {func} instead of {output.func}")
        return None if output is None or output.changed else output

    def take_whole(self, place: Place, func: Any) -> _Whole | None:
        """The same for a function that begins there."""
        output = self._outputs.get(place)
        if not isinstance(output, _Whole) or output.func is not func:
            return None
        del self._outputs[place]
        return None if output.changed else output

    def forget_changed(self) -> None:
        """The first forward has ended. What it changed in place is of no use and need not be held."""
        self._by_address = {}
        changed = set(map(id, changed_of([node for _, node in self._taken])))
        for output, node in self._taken:
            output.spoilt |= id(node) in changed
        self._taken = []
        kept = {place: output for place, output in self._outputs.items() if not output.changed}
        for counts in _observers:
            counts[self.unit] = counts.get(self.unit, 0) + len(self._outputs) - len(kept)
        self._outputs = kept


class _Scope(Watching):
    """Keeps the outputs of wanted ops, or hands them out. Entered once, or around single functions of what it is for:
    these ops are counted over all of it."""

    def __init__(self, frame: CallOutputs, wanted: Callable[[Any], bool]) -> None:
        super().__init__(frame.unit)
        frame.scopes += 1
        self._frame, self._number, self._wanted = frame, frame.scopes, wanted
        self._functions = self._ops = 0
        self.learning: products.Ops | None = None

    def look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if passes_by(func):
            return func(*args, **kwargs)
        wanted = self._wanted(func) and not writes_to_given(func, args, kwargs)
        if not wanted or draws_random_numbers(func, args, kwargs):
            if func in CHANGED_BY_WATCHING:
                refuse_watching(func, args, self._frame.unit)
            out, kind = func(*args, **kwargs), kind_of(func)
            # torch.matmul's last step is one; torch.unsafe_split outside of a scope leaves watching to its caller
            if kind == "hidden view" and self._frame.recording:
                self._frame.watch(args[0], out)
            elif kind == "writes":
                count_writes(func, args)
            elif func is TO_COPY and self.learning is not None:
                self.learning.casts.append((args[0], out))
            return out
        self._ops += 1
        place = self._number, self._functions, self._ops
        if self._frame.recording:
            out = func(*args, **kwargs)
            self._frame.keep(place, _Output(func, out))
            if self.learning is not None:
                self.learning.wanted.append(out)
            return out
        kept = self._frame.take(place, func)
        return func(*args, **kwargs) if kept is None else kept.again()

    def next_function(self) -> Place:
        """Where the next function stands, and its ops after it. Those without wanted ops are not counted."""
        self._functions, self._ops = self._functions + bool(self._ops), 0
        return self._number, self._functions, 0

    def as_a_whole(self) -> None:
        """The function's ops are not looked at."""
        self._ops = 1


class KeepingReplay(Replay):
    """A replay in whose forwards scopes find their frame."""

    def __init__(self, module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(module, state, args, kwargs)
        self.frame = CallOutputs(state.unit, unseen=state.memory.code.writes_to_any)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.first is None and not self._over:
            self.frame.whole = False
        with self.frame.running(recording=self.first is not None):
            return super().__call__(*tensors)

    def finish(self) -> None:
        super().finish()
        self.frame.forget_changed()


class _Noted(list[torch.Tensor]):
    """What autograd saves, noted on its way to the hook ``pack``. To be cleared: autograd holds on to this."""

    __slots__ = ("_pack",)

    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        self._pack = pack

    def note(self, tensor: torch.Tensor) -> Any:
        self.append(tensor)
        return self._pack(tensor)


class _Calls(TorchFunctionMode):
    """Opens a scope around calls of functions that may run a wanted op: seeing functions costs far less than seeing
    every op. Functions that are known to run nothing but one such op need no scope, nor a second call."""

    def __init__(self, frame: CallOutputs, wanted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._frame, self._attention = frame, wanted is is_attention
        self._scope = _Scope(frame, wanted)

    @run_as_it_is
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, kwargs = self._frame, kwargs or {}
        if (
            torch.compiler.is_dynamo_compiling()  # of a branch of torch.cond
            or type(func) is MethodWrapperType
            or func in LIGHT_FUNCTIONS
            or frame.inside
            or torch.is_inference_mode_enabled()  # its tensors count no versions: what it makes is made again
            or (self._attention and not _names_attention(func))
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        frame.inside = True
        try:
            return self._watched(func, args, kwargs)
        finally:
            frame.inside = False

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that may run a wanted op, or hand out what it returned."""
        frame, scope = self._frame, self._scope
        place = scope.next_function()
        key = products.key_of(func, args, kwargs) if func in products.PRODUCTS and frame.whole else None
        if not frame.recording:
            kept = frame.take_whole(place, func)
            if kept and key and (out := kept.instead(key, (*args, *kwargs.values()), frame.unit)) is not None:
                scope.as_a_whole()
                return out
        hooks = hooks_in_force(False) if frame.recording and key is not None and not _other_modes() else None
        if hooks is None or (known := products.Learnt.products.get(key, products.NEW)) is None:
            with scope:
                return func(*args, **kwargs)
        saved, given = _Noted(hooks[0]), (*args, *kwargs.values())
        scope.learning = ops = products.Ops([], []) if known is products.NEW else None
        try:
            with saved_tensors_hooks(saved.note, hooks[1]), nullcontext() if ops is None else scope:
                out = func(*args, **kwargs)
        finally:
            scope.learning = None
        sources, made = products.sources_of(saved, given, known, ops)
        layouts = [*map(geometry_of, saved)]
        saved.clear()
        if ops is not None:
            products.learn(key, ops.wanted, out, sources, made)
            return out
        scope.as_a_whole()
        if known == sources:
            frame.keep(place, _Whole(key, out, tuple(zip(sources, layouts, strict=True)), made))
        else:
            products.Learnt.products[key] = None
        return out


@functools.cache
def _names_attention(func: Any) -> bool:
    """Whether a function may run a fused attention. Those that do say so in their names."""
    name = getattr(func, "__name__", "")
    return "attention" in name or "attn" in name


def _other_modes() -> bool:
    """Whether other ops may run than those of plain tensors: a mode may put others in their place."""
    if current_transform() is not None or user_modes():
        return True
    return not all(getattr(mode, "only_records", False) for mode in _get_current_dispatch_mode_stack())


class ScopeState(Attachment):
    """The attachment of a module inside a unit whose products are kept, or with ``attention`` its fused attentions."""

    def __init__(self, unit: str, *, attention: bool = False) -> None:
        super().__init__(unit)
        self.attention = attention


def run_scope(module: nn.Module, state: ScopeState, /, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, with the outputs of its heavy ops kept where its unit is being kept track of."""
    frame: CallOutputs | None = None if torch.compiler.is_compiling() else getattr(_current, "frame", None)
    if not state.active or frame is None or frame.unit != state.unit or frame.inside:
        return call_inner(module, state, args, kwargs)
    with _Calls(frame, is_attention if state.attention else is_heavy):
        return call_inner(module, state, args, kwargs)
