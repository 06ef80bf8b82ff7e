"""Logits that are not there yet: a tensor that knows the rows it would be computed from.

What is done to it row by row or element by element is only noted down, and cross-entropy runs over chunks of rows.
Whatever else touches it gets the real logits, computed then and there; what neither can be done for is an error.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autockpt.errors import ConflictError
from autockpt.policies.attachment import Attachment
from autockpt.policies.base import InPlaceError
from autockpt.policies.headcall import Autocast, CrossEntropy, Elementwise, Rows, refuse_twice

_plain_call = torch._C.DisableTorchFunctionSubclass


class ChunkState(Attachment):
    """The attachment of an output head. ``tokens`` are the rows of one chunk."""

    def __init__(self, unit: str, tokens: int) -> None:
        super().__init__(unit)
        self.tokens = tokens
        self.warned = False

    def chunk(self, rows: int) -> int:
        """How many of so many rows make a chunk."""
        return self.tokens

    def warn(self, why: str) -> None:
        """Say once that the logits exist as a whole after all."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.unit}: chunked_loss computes all logits at once, {why}: they take the memory that the choice "
                "was to save. Results are right.",
                stacklevel=3,
            )


class _Family:
    """All lazy logits that stem from one call: in plain training they may share memory."""

    def __init__(self) -> None:
        self.derived = 0
        self.chunked = False
        self.watchers: list[Callable[..., Any]] = []
        self._ways: set[object] = set()

    def way(self, source: _Source) -> Callable[[], None]:
        """To be called when backward comes by what was made of these logits, as often as it does.

        Raises ConflictError then where another way was taken, too, and bits would differ: plain training takes a step
        on the logits once, and adds up gradients before it, not behind it. Holds no tensors.
        """
        if not (source.steps and source.call.exact):
            return _nothing
        return functools.partial(self._passing, object(), source.call)

    def _passing(self, way: object, call: Rows) -> None:
        self._ways.add(way)
        if len(self._ways) > 1:
            raise ConflictError(
                f"the logits of {call.unit} are used for more than one cross-entropy, and the gradients of that would "
                f"not be bit-equal under {call.choice}",
                remedy=f"Use `save` on {call.unit}.",
            )


def _nothing() -> None:
    pass


@dataclass(eq=False)
class _Source:
    """What lazy logits are made of: features of their rows, and what is done to the head's output."""

    call: Rows
    state: ChunkState
    hidden: Tensor
    steps: tuple[Elementwise, ...]
    dtype: torch.dtype
    vocabulary: int
    family: _Family
    version: int = 0
    real: Tensor | None = None
    seen: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.vocabulary)

    def check(self) -> None:
        """Raise InPlaceError where the features are no longer what they were."""
        if self.hidden._version != self.version:
            raise InPlaceError(
                f"the features of {self.call.unit} have been modified by an inplace operation since its forward, and "
                "its logits are only computed when they are needed",
                remedy="Change a copy of them.",
            )

    def compute(self, hidden: Tensor) -> Tensor:
        """The logits of these rows, whole."""
        self.check()
        with self.call.running():
            logits = self.call.rows(hidden)
            for step in self.steps:
                logits = step(logits)
        return logits

    def whole(self, why: str) -> Tensor:
        """The real logits; part of autograd's graph where gradients are enabled."""
        if self.real is not None:
            return self.real
        if not torch.is_grad_enabled():
            if self.seen is None:
                self.seen = self.compute(self.hidden).detach()
            return self.seen
        self.real = self.compute(self.hidden)
        if self.call.exact:
            if self.steps and self.real.requires_grad:
                passing = self.family.way(self)
                self.real.register_hook(lambda _: passing())
        else:
            self.state.warn(why)
        self.watch(self.real)
        return self.real

    def watch(self, result: Tensor) -> None:
        """FSDP wants to know when backward reaches a model's output: this is where it will come by."""
        for watcher in self.family.watchers:
            if result.requires_grad:
                result.register_hook(watcher)

    def derive(self, **changes: Any) -> LazyLogits:
        self.family.derived += 1
        if "hidden" in changes:
            changes["version"] = changes["hidden"]._version
        return _stand_in(replace(self, **changes, real=None, seen=None))


class LazyLogits(Tensor):
    """Stands for logits. Also a node of autograd's graph, so that gradients are right whatever C++ code uses it."""

    _source: _Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with _plain_call():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and first._source.real is None:
            with _plain_call():
                understood = _UNDERSTOOD.get(func)
            if understood is not None and not _lazies((args[1:], kwargs), but=first):
                with torch._C.DisableTorchFunctionSubclass():
                    result = understood(first._source, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
                if result is not NotImplemented:
                    return result
        if func is _T.register_hook and _is_distributed(args[1]) and first._source.real is None:
            first._source.family.watchers.append(args[1])
            with _plain_call():
                return func(*args, **kwargs)
        name = _name(func)
        for lazy in _lazies((args, kwargs)):
            _before_use(lazy, name, args, kwargs)
        return func(*_real(args, name), **_real(kwargs, name))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # below autograd, which has noted the stand-in: values only
        with torch.no_grad():
            args, kwargs = _real(args, str(func)), _real(kwargs or {}, str(func))
        return func(*args, **kwargs)


def lazy_logits(call: Rows, state: ChunkState, hidden: Tensor, like: Tensor) -> LazyLogits:
    """Logits of ``hidden`` (… × features) with the last size and type of ``like``."""
    return _stand_in(
        _Source(call, state, hidden, (), like.dtype, like.shape[-1], _Family(), version=hidden._version),
    )


def _stand_in(source: _Source) -> LazyLogits:
    return _StandIn.apply(source, source.hidden, *source.call.trained)  # type: ignore[return-value]


class _StandIn(torch.autograd.Function):
    """Makes lazy logits; its backward is that of the whole logits, for users that Python does not see."""

    @staticmethod
    def forward(ctx: Any, source: _Source, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.source = source
        lazy = Tensor._make_wrapper_subclass(LazyLogits, source.shape, dtype=source.dtype, device=hidden.device)  # type: ignore[attr-defined]
        lazy._source = source
        return lazy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        source: _Source = ctx.source
        refuse_twice(source.call)
        with torch.enable_grad():
            hidden = source.hidden.detach().requires_grad_()
            logits = source.compute(hidden)
        found = torch.autograd.grad(logits, [hidden, *source.call.trained], gradients[0], allow_unused=True)
        return None, *found


# --- what is understood -----------------------------------------------------------------------------------------------


def _view(source: _Source, *shape: Any, **more: Any) -> Any:
    """Another shape of the rows. In plain training it may share memory with the original, as here."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if more or not shape or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    last, rows = shape[-1], source.hidden.shape[:-1].numel()
    total = rows * source.vocabulary
    if -1 in shape:
        known = -math.prod(shape)
        if shape.count(-1) != 1 or known <= 0 or total % known:
            return NotImplemented
        shape = tuple(total // known if n == -1 else n for n in shape)
        last = shape[-1]
    if last != source.vocabulary or math.prod(shape) != total:
        return NotImplemented
    return source.derive(hidden=source.hidden.reshape(*shape[:-1], source.hidden.shape[-1]))


def _flatten(source: _Source, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = source.hidden.dim()
    end = end_dim + dims if end_dim < 0 else end_dim
    start = start_dim + dims if start_dim < 0 else start_dim
    if not 0 <= start <= end < dims - 1:
        return NotImplemented
    return source.derive(hidden=source.hidden.flatten(start, end))


def _contiguous(source: _Source, **more: Any) -> Any:
    return NotImplemented if more else source.derive()


def _index(source: _Source, index: Any) -> Any:
    """Some of the rows: slices, positions and masks that leave the vocabulary alone."""
    hidden = source.hidden
    if isinstance(index, Tensor):
        if index.dtype not in (torch.bool, torch.int64) or index.dim() > (hidden.dim() - 1 if _mask(index) else 1):
            return NotImplemented
        return source.derive(hidden=hidden[index])
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(p) in (int, slice) or p is Ellipsis for p in parts) or parts.count(Ellipsis) > 1:
        return NotImplemented
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (hidden.dim() - len(parts) + 1), *parts[at + 1 :])
    if len(parts) == hidden.dim():
        if parts[-1] != slice(None):
            return NotImplemented
        parts = parts[:-1]
    if len(parts) > hidden.dim() - 1:
        return NotImplemented
    rows = hidden[parts]
    return source.derive(hidden=rows) if rows.dim() >= 2 else NotImplemented


def _mask(index: Tensor) -> bool:
    return index.dtype is torch.bool


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(source: _Source, **more: Any) -> Any:
        return NotImplemented if more else _step(source, lambda logits: logits.to(dtype), dtype)

    return cast


def _to(source: _Source, *args: Any, **kwargs: Any) -> Any:
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    except TypeError:
        return NotImplemented
    if memory_format is not None or (device is not None and device != source.hidden.device):
        return NotImplemented
    if dtype is None or dtype == source.dtype:
        return source.derive()
    return _cast(dtype)(source) if dtype.is_floating_point else NotImplemented


def _by_number(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(source: _Source, other: Any, **more: Any) -> Any:
        if more or type(other) not in (int, float):
            return NotImplemented
        return _step(source, lambda logits: function(logits, other), source.dtype)

    return apply


def _tanh(source: _Source, **more: Any) -> Any:
    return NotImplemented if more else _step(source, torch.tanh, source.dtype)


def _step(source: _Source, step: Elementwise, dtype: torch.dtype) -> LazyLogits:
    return source.derive(steps=(*source.steps, step), dtype=dtype)


def _detached(source: _Source) -> Tensor:
    with torch.no_grad():
        return source.whole("").detach()


def _cross_entropy(
    source: _Source,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Chunked, where the rows are a matrix and the targets are class indices without weights."""
    hidden = source.hidden
    if weight is not None or size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        return NotImplemented
    if type(target) is not Tensor or target.dtype is not torch.int64 or target.dim() != 1 or hidden.dim() != 2:
        return NotImplemented
    if len(target) != len(hidden) or len(hidden) == 0 or not torch.is_grad_enabled():
        return NotImplemented
    source.check()
    settings = CrossEntropy(
        source.call,
        source.steps,
        source.state.chunk(len(hidden)),
        reduction,
        ignore_index,
        label_smoothing,
        Autocast(hidden.device.type),
        source.family.way(source),
    )
    loss = source.call.loss(settings, hidden, target)
    if loss is None:
        return NotImplemented
    source.family.chunked = True
    source.watch(loss)
    return loss


_REDUCTIONS = ("mean", "sum", "none")
_T: Any = Tensor
_UNDERSTOOD: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    _T.detach: _detached,
    torch.detach: _detached,
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _view),
    **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
    _T.contiguous: _contiguous,
    _T.__getitem__: _index,
    _T.float: _cast(torch.float32),
    _T.double: _cast(torch.float64),
    _T.half: _cast(torch.float16),
    _T.bfloat16: _cast(torch.bfloat16),
    _T.to: _to,
    **dict.fromkeys((_T.mul, torch.mul, _T.__mul__, _T.__rmul__), _by_number(torch.mul)),
    **dict.fromkeys((_T.div, torch.div, _T.true_divide, torch.true_divide, _T.__truediv__), _by_number(torch.div)),
    **dict.fromkeys((_T.tanh, torch.tanh), _tanh),
}

# answered without any logits
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
    *("requires_grad", "is_leaf", "grad_fn", "grad"),
    *("is_cpu", "is_cuda", "is_meta", "is_quantized", "is_sparse", "is_nested", "retains_grad", "output_nr"),
    *("_base", "_version", "_backward_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex"),
)
_ABOUT: frozenset[Any] = frozenset(
    {
        *(getattr(_T, name).__get__ for name in _PROPERTIES),
        *(getattr(_T, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
_IN_PLACE = frozenset(f"__{name}__" for name in ("setitem", *(f"i{op}" for op in ("add", "sub", "mul", "truediv"))))
_OF_GRADIENTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"})


def _before_use(lazy: LazyLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConflictError for what needs logits to be one piece of memory, where they are more than one thing."""
    source = lazy._source
    changed = args[:1] if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) else ()
    changes = any(part is lazy for part in (*changed, kwargs.get("out"), kwargs.get("inplace") and args and args[0]))
    if source.real is not None or not (changes or name in _OF_GRADIENTS):
        return
    if source.family.derived or source.family.chunked:
        what = "changes logits in place" if changes else "asks for the gradient of logits"
        raise ConflictError(
            f"{name} {what} of {source.call.unit}, which do not exist as a whole under {source.call.choice}",
            remedy=f"Use `save` on {source.call.unit}.",
        )
    with torch.enable_grad():
        source.whole(f"because of {name}")


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _is_distributed(hook: Any) -> bool:
    """Whether a hook is FSDP's own, which only wants to know that backward has begun."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")


def _lazies(tree: Any, but: Any = None) -> list[LazyLogits]:
    found: list[LazyLogits] = []

    def note(lazy: LazyLogits) -> LazyLogits:
        if lazy is not but:
            found.append(lazy)
        return lazy

    tree_map_only(LazyLogits, note, tree)
    return found


def _real(tree: Any, name: str) -> Any:
    return tree_map_only(LazyLogits, lambda lazy: lazy._source.whole(f"because {name} reads them"), tree)
