"""Logits that are not there yet: a tensor that knows the rows it would be computed from.

What is done to it row by row or element by element is only noted down, and cross-entropy runs over chunks of rows.
Whatever else touches it gets the real logits, computed then and there; what neither can be done for is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autockpt.checkpointing.divergence import CheckedCall, UnitCheck
from autockpt.checkpointing.fingerprint import quietly
from autockpt.checkpointing.op_table import METADATA
from autockpt.checkpointing.replay_context import AutocastState
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.compiling import compiled_by, run_as_it_is

_plain_call = torch._C.DisableTorchFunctionSubclass
Elementwise = Callable[[Tensor], Tensor]
_SHORT = (torch.bfloat16, torch.float16)
_IGNORED = -100
# Rows. GPU kernels choose their way by how a row lies in memory, so chunks begin as whole logits do.
_ALIGNED = 16
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as ATen numbers them


class Rows:
    """One call of a head, of which logits can be had row by row from ``hidden``: here of logits that are there already.

    ``choice`` is the one in whose name this is done, for messages; ``exact``: gradients must be bit-equal with plain
    training's; ``trained``: weights that get gradients from here; ``watch``: where a check compares the losses of a
    chunk's rows with those that forward computed.
    """

    choice: ClassVar[str] = "chunked_softmax"
    exact: ClassVar[bool] = True
    trained: tuple[nn.Parameter, ...] = ()

    def __init__(self, unit: str, size: int, check: UnitCheck | None) -> None:
        self.unit, self._size = unit, size
        observer = check.observer() if check is not None else None
        self.watch = observer if isinstance(observer, CheckedCall) else None

    def running(self) -> AbstractContextManager[None]:
        """Around calls of ``rows``."""
        return nullcontext()

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows."""
        return hidden

    def chunk(self, rows: int) -> int:
        """How many of so many rows make a chunk."""
        aligned = self._size * _ALIGNED
        return -(-rows // aligned) * _ALIGNED

    def whole(self, why: str) -> None:
        """Told when logits are made that the choice was to save."""


def refuse_odd_backward(call: Rows, gradient: Tensor) -> None:
    """Raise ConflictError in a backward that is itself to be differentiated, which would silently lose a part, and for
    several gradients at once."""
    many = torch._C._functorch.is_legacy_batchedtensor(gradient)  # type: ignore[attr-defined]
    if many or torch.is_grad_enabled():
        how = "for many gradients at once (is_grads_batched=True)" if many else "twice (create_graph=True)"
        raise ConflictError(
            f"the loss of {call.unit} cannot be differentiated {how} under {call.choice}",
            remedy=f"Use `save` on {call.unit}.",
        )


@dataclass(frozen=True)
class CrossEntropy:
    """``torch.nn.functional.cross_entropy`` of a head's logits after ``steps``, a chunk of rows at a time.

    ``options``: what is ignored, and how labels are smoothed. ``passing`` is called when backward comes by.
    """

    call: Rows
    steps: tuple[Elementwise, ...]
    reduction: str
    options: dict[str, Any]
    casts: AutocastState
    passing: Callable[[], None]

    def losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of every row."""
        logits = self.call.rows(hidden)
        for step in self.steps:
            logits = step(logits)
        with self.casts.restored(remembers=True):
            return nn.functional.cross_entropy(logits, target, reduction="none", **self.options)

    def columns(self, target: Tensor) -> Tensor:
        """Targets for a matrix that has, in its one column, what counts of each row."""
        return torch.where(target == self.options["ignore_index"], _IGNORED, 0)

    def chunks(self, rows: int) -> list[slice]:
        chunk = self.call.chunk(rows)
        return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


class ChunkedLoss(torch.autograd.Function):
    """Forward keeps nothing of the logits that it makes; backward computes each chunk again (Chen et al. 2016,
    arXiv:1604.06174) and sums the weights' gradients over chunks in single precision at least. Sums over tokens are
    left to the operator that plain training has, on one number per row."""

    @staticmethod
    def forward(ctx: Any, loss: CrossEntropy, hidden: Tensor, target: Tensor, *trained: Tensor) -> Tensor:
        parts, watch, ctx.entries = [], loss.call.watch, []
        with loss.call.running():
            for rows in loss.chunks(len(hidden)):
                parts.append(loss.losses(hidden[rows].detach(), target[rows]).detach())
                if watch is not None:
                    ctx.entries.append(watch.look_at(len(ctx.entries), parts[-1]))
                    ctx.entries[-1].let_go()
        ctx.loss, ctx.target = loss, target.clone() if ctx.entries else None
        result, total = torch.cat(parts), None
        if loss.reduction != "none":
            column, reduction = -result[:, None], REDUCTIONS[loss.reduction]
            result, total = torch.ops.aten.nll_loss_forward(column, loss.columns(target), None, reduction, _IGNORED)
        # an alias that shares the version counter, so that a change in place is noticed: below autograd views do not
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            ctx.save_for_backward(hidden.detach(), target, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss: CrossEntropy = ctx.loss
        gradient = gradients[0]
        refuse_odd_backward(loss.call, gradient)
        loss.passing()
        hidden, target, total = _saved(ctx, loss)
        if total is not None:
            column, reduction = total.new_empty((len(hidden), 1)), REDUCTIONS[loss.reduction]
            classes = loss.columns(target)
            of_column = torch.ops.aten.nll_loss_backward(gradient, column, classes, None, reduction, _IGNORED, total)
            gradient = -of_column[:, 0]
        _, wants_hidden, _, *wants = ctx.needs_input_grad
        trained = [p for p, wanted in zip(loss.call.trained, wants, strict=True) if wanted]
        of_hidden = hidden if _nobody_else_holds(hidden) else torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(trained)
        chunks, casts = loss.chunks(len(hidden)), AutocastState([hidden.device.type])
        with loss.call.running():
            for rows, entry in zip_longest(chunks, ctx.entries):
                with torch.inference_mode(False), torch.enable_grad():
                    part = hidden[rows].detach().requires_grad_(wants_hidden)
                    losses = loss.losses(part, target[rows])
                if entry is not None:
                    # for the targets of forward: backward is for those of now, which in plain training it reads, too
                    same = loss.losses(part.detach(), ctx.target[rows]) if loss.call.exact else losses.detach()
                    entry.handed(same)
                inputs = [part, *trained] if wants_hidden else trained
                with casts.restored(remembers=True):
                    found = list(gradients_of(losses, inputs, gradient[rows]))
                if wants_hidden and found[0] is not None:
                    of_hidden[rows] = found[0]
                pairs = zip(sums, found[1:] if wants_hidden else found, strict=True)
                sums = [_added(total, more, alone=len(chunks) == 1) for total, more in pairs]
                del losses, found, pairs  # before the next chunk's are made
        results = iter(s if s is None else s.to(p.dtype) for s, p in zip(sums, trained, strict=True))
        return None, of_hidden if wants_hidden else None, None, *(next(results) if w else None for w in wants)


def gradients_of(output: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Those of inputs that autograd, whose backward this is part of, is handed next: it runs their hooks then."""
    kept = [(hooks, hooks.copy()) for tensor in inputs if (hooks := tensor._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        return torch.autograd.grad(output, inputs, gradient, allow_unused=True)
    finally:
        for hooks, those in kept:
            hooks.update(those)


def _saved(ctx: Any, loss: CrossEntropy) -> tuple[Tensor, ...]:
    """What backward was given. Raises InPlaceError where it was changed in place since."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        what = "logits" if loss.call.exact else "features"
        raise InPlaceError(
            f"the {what} of {loss.call.unit} (or their targets) have been modified by an inplace operation since the "
            f"loss, and {loss.call.choice} reads them again in backward",
            remedy=f"Change a clone of them, or use `save` on {loss.call.unit}.",
        ) from error


def _nobody_else_holds(saved: Tensor) -> bool:
    """Whether memory may be written over: no other tensor is on it, and this backward is the graph's last."""
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    holders, one = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (saved, torch.empty(0)))
    return not kept and holders == one


def _added(total: Tensor | None, part: Tensor | None, *, alone: bool) -> Tensor | None:
    if part is None or alone:
        return part
    if total is None:
        return part.float() if part.dtype in _SHORT else part
    return total.add_(part)


class _Family:
    """All lazy logits that stem from one call: in plain training they may share memory."""

    def __init__(self) -> None:
        self.used = False  # others were derived, or a loss was chunked
        self.watchers: list[Callable[..., Any]] = []
        self._ways: set[object] = set()

    def apart(self) -> _Family:
        """That of a copy, which plain training has in memory of its own, too."""
        copied = _Family()
        copied.watchers, copied._ways = self.watchers, self._ways
        return copied

    def way(self, source: LogitsSource) -> Callable[[], None]:
        """To be called when backward comes by what was made of these logits, as often as it does.

        Raises ConflictError then where another way was taken, too, and bits would differ: plain training takes a step
        on the logits once, and adds up gradients before it, not behind it. Holds no tensors.
        """
        if not (source.steps and source.call.exact):
            return lambda: None
        ways, way, call = self._ways, object(), source.call

        def passing() -> None:
            ways.add(way)
            if len(ways) > 1:
                raise ConflictError(
                    f"the logits of {call.unit} are used for more than one cross-entropy, and the gradients of that "
                    f"would not be bit-equal under {call.choice}",
                    remedy=f"Use `save` on {call.unit}.",
                )

        return passing


@dataclass(eq=False)
class LogitsSource:
    """What lazy logits are made of: features of their rows, and what is done to the head's output.

    ``real`` are the logits themselves, once somebody has them; ``made`` the first such, of this source and of those
    that have another shape of its memory.
    """

    call: Rows
    hidden: Tensor
    steps: tuple[Elementwise, ...]
    dtype: torch.dtype
    vocabulary: int
    family: _Family
    made: list[Tensor] = field(default_factory=list)
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
                self.seen = self._made_once().detach()
            return self.seen
        self.real = self._made_once()
        if not self.made:
            self.made.append(self.real)
            self.call.whole(why)
            passing = self.family.way(self)
            if self.real.requires_grad:
                self.real.register_hook(lambda _: passing())
        self.tell_watchers(self.real)
        return self.real

    def _made_once(self) -> Tensor:
        return self.made[0].reshape(self.shape) if self.made else self.compute(self.hidden)

    def tell_watchers(self, result: Tensor) -> None:
        """FSDP wants to know when backward reaches a model's output: this is where it will come by."""
        for watcher in self.family.watchers:
            if result.requires_grad:
                result.register_hook(watcher)

    def derive(self, **changes: Any) -> LazyLogits:
        self.family.used = True
        if "hidden" in changes:
            changes["version"] = changes["hidden"]._version
            if self.call.exact and not _share(changes["hidden"], self.hidden):
                self.check()  # what was written to the original would be in the copy
                changes["family"] = self.family.apart()
        made = self.made if "steps" not in changes and _same_memory(self.hidden, changes.get("hidden")) else []
        return _stand_in(replace(self, **changes, made=made, real=None, seen=None))


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _same_memory(hidden: Tensor, other: Tensor | None) -> bool:
    """Whether one is the other, at most in another shape."""
    if other is None:
        return True
    alike = hidden.data_ptr() == other.data_ptr() and hidden.numel() == other.numel()
    return alike and hidden.is_contiguous() and other.is_contiguous()


class LazyLogits(Tensor):
    """Stands for logits. Also a node of autograd's graph, so that gradients are right whatever C++ code uses it."""

    _source: LogitsSource

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with compiled_by(None) as compiler:
            if compiler and func not in _ABOUT:
                _refuse_compiled(_lazies((args, kwargs)))
            return cls._called(func, args, kwargs or {})

    @classmethod
    def _called(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first: Any = args[0] if args else kwargs.get("input")
        if func in _ABOUT:
            with _plain_call():
                return func(*args, **kwargs)
        if isinstance(first, LazyLogits) and not first._source.made:  # else they may have been written to
            with _plain_call():
                understood = UNDERSTOOD.get(func)
            if understood is not None and not _lazies((args[1:], kwargs), but=first):
                with _plain_call():
                    result = understood(first._source, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
                if result is not NotImplemented:
                    return result
        if func is Tensor.register_hook and _is_distributed(args[1]) and first._source.real is None:
            first._source.family.watchers.append(args[1])
            with _plain_call():
                return func(*args, **kwargs)
        name = _name(func)
        for lazy in _lazies((args, kwargs)):
            _before_use(lazy, name, args, kwargs)
        # a reentrant checkpoint calls backward inside of backward, where gradients are off
        with torch.set_grad_enabled(torch.is_grad_enabled() or func is torch.autograd.backward):
            args, kwargs = _real(args, name), _real(kwargs, name)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # below autograd, which has noted the stand-in: values only
        with torch.no_grad():
            args, kwargs = _real(args, str(func)), _real(kwargs or {}, str(func))
        return func(*args, **kwargs)


_entered: Any = LazyLogits.__torch_function__.__func__  # type: ignore[attr-defined]
run_as_it_is(_entered, calls=False)
_entered._torchdynamo_disable = True  # never a part of a graph, as torch.compiler.disable says


def lazy_logits(call: Rows, hidden: Tensor, like: Tensor) -> LazyLogits:
    """Logits of ``hidden`` (… × features) with the last size and type of ``like``."""
    return _stand_in(LogitsSource(call, hidden, (), like.dtype, like.shape[-1], _Family(), version=hidden._version))


def _stand_in(source: LogitsSource) -> LazyLogits:
    return _StandIn.apply(source, source.hidden, *source.call.trained)  # type: ignore[return-value]


class _StandIn(torch.autograd.Function):
    """Makes lazy logits; its backward is that of the whole logits, for users that Python does not see."""

    @staticmethod
    def forward(ctx: Any, source: LogitsSource, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.source = source
        lazy = Tensor._make_wrapper_subclass(LazyLogits, source.shape, dtype=source.dtype, device=hidden.device)  # type: ignore[attr-defined]
        lazy._source = source
        return lazy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        source: LogitsSource = ctx.source
        refuse_odd_backward(source.call, gradients[0])
        with torch.inference_mode(False), torch.enable_grad():
            hidden = source.hidden.detach().requires_grad_()
            logits = source.compute(hidden)
        return None, *gradients_of(logits, [hidden, *source.call.trained], gradients[0])


# answered without any logits
_PROPERTIES = (
    *("itemsize", "nbytes", "grad_fn", "is_quantized", "is_sparse", "is_nested", "output_nr", "_base", "_version"),
    "_backward_hooks",
)
_ABOUT: frozenset[Any] = METADATA | {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.ndimension, Tensor.nelement, Tensor.element_size, Tensor.get_device),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_IN_PLACE = frozenset(f"__{name}__" for name in ("setitem", *(f"i{op}" for op in ("add", "sub", "mul", "truediv"))))
_OF_GRADIENTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"})


def _before_use(lazy: LazyLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConflictError for what needs logits to be one piece of memory, where they are more than one thing."""
    source = lazy._source
    changed = args[:1] if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) else ()
    changes = any(part is lazy for part in (*changed, kwargs.get("out"), kwargs.get("inplace") and args and args[0]))
    if source.real is not None or not (changes or name in _OF_GRADIENTS):
        return
    if source.family.used:
        what = "changes logits in place" if changes else "asks for the gradient of logits"
        raise ConflictError(
            f"{name} {what} of {source.call.unit}, which do not exist as a whole under {source.call.choice}",
            remedy=f"Use `save` on {source.call.unit}.",
        )
    with torch.enable_grad():
        source.whole(f"because of {name}")


def _refuse_compiled(lazies: list[LazyLogits]) -> None:
    """Raise ConflictError in a compiled loss, whose graph cannot take logits that are not there: it would run as if it
    were not compiled, and with other bits."""
    for lazy in lazies:
        call = lazy._source.call
        if call.exact and lazy._source.real is None:
            raise ConflictError(
                f"the logits of {call.unit} go into compiled code, which cannot take them under {call.choice}: the "
                "loss would run uncompiled, and its gradients would not be bit-equal",
                remedy=f"Use `save` or `chunked_loss` on {call.unit}, or do not compile the loss.",
            )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _is_distributed(hook: Any) -> bool:
    """Whether a hook is FSDP's own, which only wants to know that backward has begun."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")


def _lazies(tree: Any, but: Any = None) -> list[LazyLogits]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, LazyLogits) and leaf is not but]


def _real(tree: Any, name: str) -> Any:
    return tree_map_only(LazyLogits, lambda lazy: lazy._source.whole(f"because {name} reads them"), tree)


# What is done to lazy logits without making them: views and casts of rows, steps element by element, and cross-entropy
# over chunks of rows. Each takes the source of the logits and the arguments of a tensor's method or of a function of
# PyTorch, and answers NotImplemented for what needs the logits themselves.


def _shaped(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Another shape of the rows. In plain training it may share memory with the original, as here."""

    def apply(source: LogitsSource, *args: Any, **more: Any) -> Any:
        try:
            with quietly():
                shape = function(torch.empty(source.shape, device="meta"), *args, **more).shape
        except (RuntimeError, TypeError, IndexError):  # PyTorch says what is wrong of the logits themselves
            return NotImplemented
        if shape[-1:] != (source.vocabulary,):
            return NotImplemented
        return source.derive(hidden=source.hidden.reshape(*shape[:-1], source.hidden.shape[-1]))

    return apply


def _index(source: LogitsSource, index: Any) -> Any:
    """Some of the rows: slices, positions and masks that leave the vocabulary alone."""
    hidden = source.hidden
    if isinstance(index, Tensor):
        most = {torch.bool: hidden.dim() - 1, torch.int64: 1}
        if index.dim() > most.get(index.dtype, -1):
            return NotImplemented
        return source.derive(hidden=hidden[index])
    if not all(type(p) in (int, slice, type(...)) for p in (index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    sizes = source.vocabulary, source.vocabulary + 1
    try:
        with quietly():
            left = [torch.empty((*hidden.shape[:-1], size), device="meta")[index].shape[-1:] for size in sizes]
    except IndexError:
        return NotImplemented
    if left != [(size,) for size in sizes]:
        return NotImplemented
    rows = hidden[index]
    return source.derive(hidden=rows) if rows.dim() >= 2 else NotImplemented


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda source, **more: _to(source, dtype, **more)


def _to(source: LogitsSource, *args: Any, **kwargs: Any) -> Any:
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    except (TypeError, RuntimeError):  # that of `copy`
        return NotImplemented
    if memory_format is not None or (device is not None and device != source.hidden.device):
        return NotImplemented
    if dtype is None or dtype == source.dtype:  # in plain training the same memory
        return source.derive()
    if not dtype.is_floating_point:
        return NotImplemented
    return source.derive(steps=(*source.steps, lambda logits: logits.to(dtype)), dtype=dtype)


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function of the logits alone, or of them and a number."""

    def apply(source: LogitsSource, *numbers: Any, **more: Any) -> Any:
        if more or any(type(number) not in (int, float) for number in numbers):
            return NotImplemented
        return source.derive(steps=(*source.steps, lambda logits: function(logits, *numbers)))

    return apply


def _contiguous(source: LogitsSource, **more: Any) -> Any:
    return NotImplemented if more else source.derive(hidden=source.hidden.contiguous())


def _detached(source: LogitsSource) -> Tensor:
    with torch.no_grad():
        return source.whole("").detach()


def _cross_entropy(
    source: LogitsSource,
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
    if weight is not None or size_average is not None or reduce is not None or reduction not in REDUCTIONS:
        return NotImplemented
    if type(target) is not Tensor or target.dtype is not torch.int64 or target.dim() != 1 or hidden.dim() != 2:
        return NotImplemented
    if len(target) != len(hidden) or len(hidden) == 0 or not torch.is_grad_enabled():
        return NotImplemented
    if label_smoothing and source.call.exact:  # of two sums over all tokens, which chunks would take in another order
        return NotImplemented
    source.check()
    family, options = source.family, {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    casts, passing = AutocastState([hidden.device.type]), family.way(source)
    settings = CrossEntropy(source.call, source.steps, reduction, options, casts, passing)
    loss: Any = ChunkedLoss.apply(settings, hidden, target, *source.call.trained)
    family.used = True
    source.tell_watchers(loss)
    return loss


_T: Any = Tensor
UNDERSTOOD: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    _T.detach: _detached,
    torch.detach: _detached,
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _shaped(torch.Tensor.reshape)),
    **dict.fromkeys((_T.flatten, torch.flatten), _shaped(torch.flatten)),
    _T.contiguous: _contiguous,
    _T.__getitem__: _index,
    _T.float: _cast(torch.float32),
    _T.double: _cast(torch.float64),
    _T.half: _cast(torch.float16),
    _T.bfloat16: _cast(torch.bfloat16),
    _T.to: _to,
    **dict.fromkeys((_T.mul, torch.mul, _T.__mul__, _T.__rmul__), _elementwise(torch.mul)),
    **dict.fromkeys((_T.div, torch.div, _T.true_divide, torch.true_divide, _T.__truediv__), _elementwise(torch.div)),
    **dict.fromkeys((_T.tanh, torch.tanh), _elementwise(torch.tanh)),
}
