"""Outputs that one forward of a unit keeps, and hands out when that forward runs again.

Works below autograd: the second forward builds its graph as usual, only the kernels of kept ops are not executed. The
dispatch mode that does this costs host time for every op it sees, so it is entered around the modules in question only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodWrapperType
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from autockpt.errors import ConflictError
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.heavy import draws_random_numbers, is_attention, is_heavy
from autockpt.policies.replay import Replay, ReplayState
from autockpt.policies.watching import CHANGED_BY_WATCHING, refuse_watching

Geometry = tuple[torch.Size, tuple[int, ...], int]
_current = threading.local()
_aten = torch.ops.aten
# Their results share memory with their argument, but no version counter: torch.matmul's last step is one of them. Seen
# inside of scopes only, which is where matmul is; torch.unsafe_split outside of one leaves watching to its caller.
_UNDECLARED_VIEWS = frozenset(
    (_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default)
)


_LEAF = tree_structure(0)


class _Output:
    """What one op returned. Its tensors are aliases without a graph, which share their version counters. With
    ``geometry`` it is what the function around the op returned, and the op itself a tensor of that layout."""

    def __init__(self, func: Any, out: Any, geometry: Geometry | None = None) -> None:
        leaves, self._form = ([out], _LEAF) if type(out) is torch.Tensor else tree_flatten(out)
        self.func, self._geometry = func, geometry
        self._leaves = [alias(leaf) for leaf in leaves]
        self._watched = [(leaf, leaf._version) for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def watch(self, out: Any) -> None:
        """Look out for changes by way of ``out`` too, which shares memory and no version counter with the output."""
        leaves = [alias(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._watched += [(leaf, leaf._version) for leaf in leaves]

    def addresses(self) -> Iterator[int]:
        """What identifies its tensors' memory, for as long as this lives."""
        leaves = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        return (address for leaf in leaves if (address := _address(leaf)) is not None)

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since."""
        return any(tensor._version != version for tensor, version in self._watched)

    def again(self) -> Any:
        if self._geometry is not None:
            return alias(self._leaves[0], self._geometry)
        return tree_unflatten([alias(leaf) for leaf in self._leaves], self._form)


def alias(leaf: Any, geometry: Geometry | None = None) -> Any:
    """The same memory under a tensor of its own, without a graph, that shares the version counter.

    Below autograd views do not share it by themselves, and a change in place would go unnoticed.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach() if geometry is None else leaf.as_strided(*geometry)


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # tensors without one storage
        return None


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


class Frame:
    """Kept outputs of one call of a unit, by the order in which its scopes are entered and their ops run.

    An output that is changed in place is not handed out: its op runs again.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.recording = True
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._by_address: dict[int, _Output] = {}
        self._scopes = 0
        self._inside = False

    def begin(self, *, recording: bool) -> None:
        """The unit's forward begins, for the first time or again."""
        self.recording, self._scopes, self._inside = recording, 0, False

    def scope(self, wanted: Callable[[Any], bool]) -> _Scope:
        """A mode that keeps the outputs of wanted ops, or hands them out."""
        self._scopes += 1
        return _Scope(self, self._scopes, wanted)

    @property
    def inside(self) -> bool:
        """Whether a scope is open: it sees all that runs within it, so another inside would count ops twice."""
        return self._inside

    def keep(self, place: tuple[int, int], func: Any, out: Any, geometry: Geometry | None = None) -> None:
        self._outputs[place] = output = _Output(func, out, geometry)
        self._by_address |= dict.fromkeys(output.addresses(), output)

    def watch(self, source: Any, out: Any) -> None:
        """``out`` is a view of ``source`` of which autograd knows nothing."""
        address = _address(source) if isinstance(source, torch.Tensor) else None
        if address is not None and (output := self._by_address.get(address)) is not None:
            output.watch(out)

    def take(self, place: tuple[int, int], func: Any) -> _Output | None:
        """What the op at this place returned; None where it must run again: its output was changed in place, or handed
        out before, in an earlier backward."""
        output = self._outputs.pop(place, None)
        if output is not None and output.func is not func:
            raise ConflictError(
                f"the forward of {self.unit} took another path when it ran again: {func} instead of {output.func}",
                remedy=f"Use `save` or `offload` on {self.unit}.",
            )
        return None if output is None or output.changed else output

    def settle(self) -> None:
        """The first forward has ended. What it changed in place is of no use and need not be held."""
        self._by_address = {}
        kept = {place: output for place, output in self._outputs.items() if not output.changed}
        for counts in _observers:
            counts[self.unit] = counts.get(self.unit, 0) + len(self._outputs) - len(kept)
        self._outputs = kept


class _Scope(TorchDispatchMode):
    """Entered once, or around single functions of what it is for: wanted ops are counted over all of it."""

    def __init__(self, frame: Frame, number: int, wanted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._frame, self._number, self._wanted = frame, number, wanted
        self._ops = 0
        self.seen: list[tuple[Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not wrapped by torch, which costs more than looking at an op

    def __enter__(self) -> Self:
        self._frame._inside = True
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._frame._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._wanted(func) or draws_random_numbers(func, args, kwargs):
            if func in CHANGED_BY_WATCHING:
                refuse_watching(func, args, self._frame.unit)
            out = func(*args, **kwargs)
            if func in _UNDECLARED_VIEWS and self._frame.recording:
                self._frame.watch(args[0], out)
            return out
        place = self.next_place()
        if self._frame.recording:
            out = func(*args, **kwargs)
            self._frame.keep(place, func, out)
            self.seen.append((func, out))
            return out
        kept = self._frame.take(place, func)
        return func(*args, **kwargs) if kept is None else kept.again()

    def next_place(self) -> tuple[int, int]:
        """Where the next wanted op stands."""
        self._ops += 1
        return self._number, self._ops


class KeepingReplay(Replay):
    """A replay in whose forwards scopes find their frame."""

    def __init__(self, module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(module, state, args, kwargs)
        self.frame = Frame(state.unit)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self.frame.begin(recording=self.first is not None)
        outer = getattr(_current, "frame", None)
        _current.frame = self.frame
        try:
            return super().__call__(*tensors)
        finally:
            _current.frame = outer

    def finish(self) -> None:
        super().finish()
        self.frame.settle()


_NAMES = """
    __abs__ __add__ __getitem__ __len__ __mul__ __neg__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ __sub__ __truediv__
    abs add amax amin bfloat16 cat chunk clamp clone contiguous cos detach div double dropout eq exp expand expand_as
    flatten float ge gelu gt half is_complex is_contiguous is_floating_point layer_norm le log lt masked_fill maximum
    mean minimum mul ne neg numel permute pow reciprocal relu repeat reshape rms_norm rsqrt select sigmoid silu sin size
    softmax split sqrt square squeeze stack stride sub sum tanh to transpose tril triu type_as unbind unflatten
    unsqueeze view view_as where
"""
LIGHT_FUNCTIONS = frozenset(
    found
    for owner in (torch, torch.Tensor, torch.nn.functional)
    for name in _NAMES.split()
    if callable(found := getattr(owner, name, None))
)
"""Functions that run no product and no attention, whatever they are given."""


class _Calls(TorchFunctionMode):
    """Opens a scope around calls of functions that may run a wanted op: seeing functions costs far less than seeing
    every op."""

    def __init__(self, frame: Frame, wanted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._frame, self._wanted = frame, wanted
        self._scope = frame.scope(wanted)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._frame.inside or func in LIGHT_FUNCTIONS or type(func) is MethodWrapperType or not self._may(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        key = _key(func, args) if not kwargs and self._frame.recording and func in _PRODUCTS else None
        if key is not None and (known := _products.get(key)) is not None:
            op, geometry = known
            out = func(*args)
            self._frame.keep(self._scope.next_place(), op, out, geometry)
            return out
        self._scope.seen.clear()
        with self._scope:
            out = func(*args, **(kwargs or {}))
        if key is not None:
            _learn(key, self._scope.seen, out)
        return out

    def _may(self, func: Any) -> bool:
        """Whether a function may run a wanted op. Those of attention say so in their names."""
        name = getattr(func, "__name__", "")
        return self._wanted is not is_attention or "attention" in name or "attn" in name


_PRODUCTS = frozenset((torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__))
# Of the products in these functions, by what they are given: the op, and how its output lies in what they return.
_products: dict[Any, tuple[Any, Geometry]] = {}
_MOST_PRODUCTS = 10_000


def _key(func: Any, args: tuple[Any, ...]) -> Any:
    """All that decides which ops a function of plain tensors runs; None where that is not known."""
    forms: list[Any] = [func, torch.is_grad_enabled()]
    for tensor in args:
        if tensor is None:
            forms.append(None)
        elif (
            type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_complex()
        ):
            forms += (tensor.size(), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        else:
            return None
    # a mode may put other ops in the place of these, autocast an op with another type
    modes = torch._C._len_torch_dispatch_stack() or torch._C._is_any_autocast_enabled()  # type: ignore[attr-defined]
    return None if modes else tuple(forms)


def _learn(key: Any, seen: list[tuple[Any, Any]], out: Any) -> None:
    """Remember where a function's product is to be found, where there is one and its output is the function's own."""
    if len(seen) != 1 or type(out) is not torch.Tensor or len(_products) >= _MOST_PRODUCTS:
        return
    op, made = seen.pop()
    if type(made) is torch.Tensor and made.dtype is out.dtype and _address(made) == _address(out):
        _products[key] = op, (made.size(), made.stride(), int(made.storage_offset()))


class ScopeState(Attachment):
    """The attachment of a module inside a unit whose products are kept, or with ``attention`` its fused attentions."""

    def __init__(self, unit: str, *, attention: bool = False) -> None:
        super().__init__(unit)
        self.attention = attention


def run_scope(module: nn.Module, state: ScopeState, /, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, with the outputs of its heavy ops kept where its unit is being kept track of."""
    frame: Frame | None = getattr(_current, "frame", None)
    if not state.active or frame is None or frame.unit != state.unit or frame.inside:
        return call_inner(module, state, args, kwargs)
    with _Calls(frame, is_attention if state.attention else is_heavy):
        return call_inner(module, state, args, kwargs)
