"""Logits that are not there yet: a tensor that knows the rows it would be computed from.

Views of rows and functions of single elements are only noted, and cross-entropy runs over chunks of rows. Any other
operator gets the real logits, which are computed then. What neither can be done for raises ConflictError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autockpt.checkpointing.arguments import flatten, holders, raise_in_words, tensors_of, unflatten
from autockpt.checkpointing.divergence import UnitCheck
from autockpt.checkpointing.fingerprint import quietly
from autockpt.checkpointing.offloaded import address_of
from autockpt.checkpointing.replay_context import AutocastState
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.compiling import compiled_by, skip_frames

_plain_call = torch._C.DisableTorchFunction  # inside, neither subclasses nor function modes see a call
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
    chunk's rows with those that forward computed. ``used``: other lazy logits were made of these, or a loss;
    ``watchers``: FSDP's hooks, to be called when backward comes by.
    """

    choice: ClassVar[str] = "chunked_softmax"
    exact: ClassVar[bool] = True
    trained: tuple[nn.Parameter, ...] = ()

    def __init__(self, unit: str, size: int, check: UnitCheck) -> None:
        self.unit, self._size = unit, size
        self.watch = check.observer()
        self.used = False
        self.watchers: list[Callable[..., Any]] = []
        self._reached: set[object] = set()

    def running(self) -> AbstractContextManager[None]:
        """Around calls of ``rows``."""
        return nullcontext()

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows."""
        return hidden

    def logits(self, hidden: Tensor, functions: Sequence[Elementwise]) -> Tensor:
        """Logits of these rows, and ``functions`` of them in turn."""
        logits = self.rows(hidden)
        for function in functions:
            logits = function(logits)
        return logits

    def chunk(self, rows: int) -> int:
        """How many of so many rows make a chunk."""
        aligned = self._size * _ALIGNED
        return -(-rows // aligned) * _ALIGNED

    def warn(self, why: str) -> None:
        """Logits are made that the choice was to save."""

    def reached_by(self, use: object) -> None:
        """Backward comes from one ``use`` of functions of the logits, where bits must be those of plain training.

        Raises ConflictError for a second use: plain training adds up gradients before it passes a function once.
        """
        self._reached.add(use)
        if len(self._reached) > 1:
            raise ConflictError(
                f"the logits of {self.unit} are used for more than one cross-entropy, and the gradients of that would "
                f"not be bit-equal under {self.choice}",
                remedy=f"Use `save` on {self.unit}.",
            )


def refuse_odd_backward(call: Any, gradient: Tensor) -> None:
    """Raise ConflictError in a backward that is itself to be differentiated, which would silently lose a part, and for
    several gradients at once."""
    # what is_grads_batched makes of gradients has no memory of its own
    many = gradient.layout is torch.strided and address_of(gradient) is None
    if many or torch.is_grad_enabled():
        how = "for many gradients at once (is_grads_batched=True)" if many else "twice (create_graph=True)"
        raise ConflictError(
            f"the loss of {call.unit} cannot be differentiated {how} under {call.choice}",
            remedy=f"Use `save` on {call.unit}.",
        )


@dataclass(eq=False)
class CrossEntropy:
    """``torch.nn.functional.cross_entropy`` of ``functions`` of a head's logits, a chunk of rows at a time.

    ``options``: what is ignored, and how labels are smoothed.
    """

    call: Rows
    functions: tuple[Elementwise, ...]
    reduction: str
    options: dict[str, Any]
    casts: AutocastState
    use: object = field(default_factory=object)

    def losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of every row."""
        logits = self.call.logits(hidden, self.functions)
        with self.casts.restored():
            return nn.functional.cross_entropy(logits, target, reduction="none", **self.options)

    def columns(self, target: Tensor) -> Tensor:
        """Targets for a matrix that has, in its one column, what counts of each row."""
        return torch.where(target == self.options["ignore_index"], _IGNORED, 0)

    def chunks(self, rows: int) -> list[slice]:
        chunk = self.call.chunk(rows)
        return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


class ChunkedCrossEntropy(torch.autograd.Function):
    """Forward keeps nothing of the logits that it makes; backward computes each chunk again (Chen et al. 2016,
    arXiv:1604.06174) and sums the weights' gradients over chunks in single precision at least. Sums over tokens are
    left to the operator that plain training has, on one number per row."""

    @staticmethod
    def forward(
        ctx: Any, loss: CrossEntropy, hidden: Tensor, alias: Tensor, target: Tensor, *trained: Tensor
    ) -> Tensor:
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
        ctx.save_for_backward(alias, target, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss: CrossEntropy = ctx.loss
        gradient = gradients[0]
        refuse_odd_backward(loss.call, gradient)
        if loss.call.exact and loss.functions:
            loss.call.reached_by(loss.use)
        try:
            hidden, target, total = ctx.saved_tensors
        except RuntimeError as error:
            what = f"what {loss.call.choice} on {loss.call.unit} reads again in backward"
            raise_in_words(error, what, f"Change a clone of it, or use `save` on {loss.call.unit}.")
            raise
        if total is not None:
            column, reduction = total.new_empty((len(hidden), 1)), REDUCTIONS[loss.reduction]
            classes = loss.columns(target)
            of_column = torch.ops.aten.nll_loss_backward(gradient, column, classes, None, reduction, _IGNORED, total)
            gradient = -of_column[:, 0]
        trained, casts = loss.call.trained, AutocastState([hidden.device.type])
        of_hidden = hidden if _nobody_else_holds(hidden) else torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(trained)
        with loss.call.running():
            for rows, entry in zip_longest(loss.chunks(len(hidden)), ctx.entries):
                with torch.inference_mode(False), torch.enable_grad():
                    part = hidden[rows].detach().requires_grad_()
                    losses = loss.losses(part, target[rows])
                if entry is not None:
                    # for the targets of forward: backward is for those of now, which in plain training it reads, too
                    same = loss.losses(part.detach(), ctx.target[rows]) if loss.call.exact else losses.detach()
                    entry.handed(same)
                with casts.restored():
                    of_rows, *found = gradients_of(losses, [part, *trained], gradient[rows])
                of_hidden[rows] = of_rows
                sums = list(map(added, sums, found))
                del losses, of_rows, found  # before the next chunk's are made
        of_trained = (s if s is None else s.to(p.dtype) for s, p in zip(sums, trained, strict=True))
        return None, of_hidden, None, None, *of_trained


def gradients_of(output: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Any, ...]:
    """Those of inputs that autograd, whose backward this is part of, is handed next: it runs their hooks then."""
    kept = [(hooks, hooks.copy()) for tensor in inputs if (hooks := tensor._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        return torch.autograd.grad(output, inputs, gradient, allow_unused=True)
    finally:
        for hooks, those in kept:
            hooks.update(those)


def _nobody_else_holds(saved: Tensor) -> bool:
    """Whether memory may be written over: no other tensor is on it, and this backward is the graph's last."""
    # torch's own backwards of compiled graphs ask this
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    return not kept and holders(saved) == 1


def added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """A sum with one more part, in fp32 of 16-bit parts."""
    if part is None:  # of a weight that no chunk uses
        return None
    if total is None:
        return part.float() if part.dtype in _SHORT else part
    return total.add_(part)


@dataclass(eq=False)
class LogitsSource:
    """What lazy logits are made of: features of their rows, and ``functions`` of the head's output.

    Under chunked_softmax without functions ``hidden`` are the logits of plain training themselves. Otherwise they are
    pending until something reads them: ``real`` is then part of autograd's graph, ``seen`` are values alone.
    """

    call: Rows
    hidden: Tensor
    functions: tuple[Elementwise, ...]
    dtype: torch.dtype
    vocabulary: int
    real: Tensor | None = field(default=None, init=False)
    seen: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.version = self.hidden._version

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.vocabulary)

    @property
    def pending(self) -> bool:
        return self.real is None and bool(self.functions or not self.call.exact)

    def check(self) -> None:
        """Raise InPlaceError where pending logits would be made of other features than at first."""
        if self.pending and self.hidden._version != self.version:
            raise InPlaceError(
                f"the features of {self.call.unit} have been modified by an inplace operation since its forward, and "
                "its logits are only computed when they are needed",
                remedy="Change a copy of them.",
            )

    def compute(self, hidden: Tensor) -> Tensor:
        """The logits of these rows, whole."""
        self.check()
        with self.call.running():
            return self.call.logits(hidden, self.functions)

    def whole(self, why: str) -> Tensor:
        """The real logits; part of autograd's graph where gradients are enabled."""
        if not self.pending:
            return self.hidden if self.real is None else self.real
        if not torch.is_grad_enabled():
            if self.seen is None:
                self.seen = self.compute(self.hidden).detach()
            return self.seen
        self.real = real = self.compute(self.hidden)
        self.call.warn(why)
        if self.call.exact and real.requires_grad:
            use, call = object(), self.call
            real.register_hook(lambda _: call.reached_by(use))
        self.tell_watchers(real)
        return real

    def tell_watchers(self, result: Tensor) -> None:
        """FSDP wants to know when backward reaches a model's output: this is where it will come by."""
        for watcher in self.call.watchers:
            if result.requires_grad:
                result.register_hook(watcher)

    def derive(self, **changes: Any) -> LazyLogits:
        self.check()
        self.call.used = True
        return _stand_in(replace(self, **changes))


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
        if func in _ABOUT:
            with _plain_call():
                return func(*args, **kwargs)
        first: Any = args[0] if args else kwargs.get("input")
        source, lazies = getattr(first, "_source", None), _lazies((args, kwargs))
        if func in UNDERSTOOD and source is not None and source.real is None and len(lazies) == 1:
            more = {name: value for name, value in kwargs.items() if name != "input"}
            result = UNDERSTOOD[func](source, func, *args[1:], **more)
            if result is not NotImplemented:
                return result
        if func is Tensor.register_hook and first._source.pending and _is_distributed(args[1]):
            first._source.call.watchers.append(args[1])
            with _plain_call():
                return func(*args, **kwargs)
        name = _name(func)
        for lazy in lazies:
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
skip_frames(_entered, calls=False)
_entered._torchdynamo_disable = True  # never a part of a graph, as torch.compiler.disable says


def lazy_logits(call: Rows, hidden: Tensor, like: Tensor) -> LazyLogits:
    """Logits of ``hidden`` (… × features) with the last size and type of ``like``."""
    return _stand_in(LogitsSource(call, hidden, (), like.dtype, like.shape[-1]))


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
_PROPERTIES = """
    shape dtype device layout requires_grad ndim is_cuda is_cpu is_meta is_leaf itemsize nbytes grad_fn is_quantized
    is_sparse is_nested output_nr _base _version _backward_hooks
"""
_METHODS = """
    size dim ndimension stride numel nelement element_size is_contiguous is_floating_point is_complex get_device __len__
"""
_ABOUT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_IN_PLACE = frozenset(f"__{name}__" for name in ("setitem", *(f"i{op}" for op in ("add", "sub", "mul", "truediv"))))
_OF_GRADIENTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"})


def _before_use(lazy: LazyLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConflictError for what needs logits to be one piece of memory, where they are more than one thing."""
    source = lazy._source
    in_place = name in _IN_PLACE or kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__"))
    changes = kwargs.get("out") is lazy or (in_place and args and args[0] is lazy)
    if not source.pending or not (changes or name in _OF_GRADIENTS):
        return
    if source.call.used:
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


def _lazies(tree: Any) -> list[LazyLogits]:
    return [tensor for tensor in tensors_of(tree) if isinstance(tensor, LazyLogits)]


def _real(tree: Any, name: str) -> Any:
    tensors: list[Tensor] = []
    template = flatten(tree, tensors)
    why = f"because {name} reads them"
    return unflatten(template, [t._source.whole(why) if isinstance(t, LazyLogits) else t for t in tensors])


# What is done to lazy logits without making them: views of rows, functions of single elements, and cross-entropy over
# chunks of rows. Each takes the source of the logits, the tensor's method or the function of PyTorch, and its
# arguments, and answers NotImplemented for what needs the logits themselves.


def _shaped(source: LogitsSource, func: Any, *args: Any, **more: Any) -> Any:
    """Another shape of the rows. In plain training it may share memory with the original, as here."""
    try:
        with quietly():
            like = func(torch.empty(source.shape, dtype=source.dtype, device="meta"), *args, **more)
    except (RuntimeError, TypeError, IndexError):  # PyTorch says what is wrong of the logits themselves
        return NotImplemented
    if like.shape[-1:] != (source.vocabulary,) or like.dtype != source.dtype:
        return NotImplemented
    return source.derive(hidden=source.hidden.reshape(*like.shape[:-1], source.hidden.shape[-1]))


def _index(source: LogitsSource, func: Any, index: Any) -> Any:
    """Some of the rows: slices, positions and masks that leave the vocabulary alone."""
    hidden, sizes = source.hidden, (source.vocabulary, source.vocabulary + 1)
    if isinstance(index, Tensor):
        most = {torch.bool: hidden.dim() - 1, torch.int64: 1}
        return NotImplemented if index.dim() > most.get(index.dtype, -1) else source.derive(hidden=hidden[index])
    if not all(type(p) in (int, slice, type(...)) for p in (index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    try:
        with quietly():
            left = [torch.empty((*hidden.shape[:-1], size), device="meta")[index].shape for size in sizes]
    except IndexError:
        return NotImplemented
    if len(left[0]) < 2 or [shape[-1] for shape in left] != list(sizes):
        return NotImplemented
    return source.derive(hidden=hidden[index])


def _elementwise(source: LogitsSource, func: Any, *args: Any, **more: Any) -> Any:
    """A cast, or a function of the logits alone, or of them and a number."""
    device = source.hidden.device
    given = [value for value in (*args, *more.values()) if type(value) is not torch.device or value != device]
    if any(type(value) not in (int, float, torch.dtype) for value in given):
        return NotImplemented
    with quietly():
        probe = torch.empty(0, dtype=source.dtype, device="meta")
        like = func(probe, *given) if given or func is not Tensor.to else probe
    if like is probe:  # in plain training the same memory
        return source.derive()
    if not like.is_floating_point():
        return NotImplemented
    return source.derive(functions=(*source.functions, lambda logits: func(logits, *given)), dtype=like.dtype)


def _detached(source: LogitsSource, func: Any) -> Tensor:
    with torch.no_grad():
        return source.whole("").detach()


def _cross_entropy(
    source: LogitsSource,
    func: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Chunked, where the rows are a matrix and the targets are class indices without weights."""
    hidden, odd = source.hidden, weight is not None or size_average is not None or reduce is not None
    if odd or reduction not in REDUCTIONS or not torch.is_grad_enabled() or type(target) is not Tensor:
        return NotImplemented
    if target.dtype is not torch.int64 or (target.dim(), hidden.dim()) != (1, 2) or not len(target) == len(hidden) > 0:
        return NotImplemented
    if label_smoothing and source.call.exact:  # of two sums over all tokens, which chunks would take in another order
        return NotImplemented
    source.check()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    settings = CrossEntropy(source.call, source.functions, reduction, options, AutocastState([hidden.device.type]))
    # saved is an alias without a graph, which shares the version counter: a change in place is noticed
    loss: Any = ChunkedCrossEntropy.apply(settings, hidden, hidden.detach(), target, *source.call.trained)
    source.call.used = True
    source.tell_watchers(loss)
    return loss


_T: Any = Tensor
_SHAPES = (_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.contiguous)
_CASTS = (_T.to, _T.float, _T.double, _T.half, _T.bfloat16)
_PRODUCTS = (_T.mul, torch.mul, _T.__mul__, _T.__rmul__)
_QUOTIENTS = (_T.div, torch.div, _T.true_divide, torch.true_divide, _T.__truediv__)
UNDERSTOOD: dict[Any, Callable[..., Any]] = {
    nn.functional.cross_entropy: _cross_entropy,
    _T.__getitem__: _index,
    **dict.fromkeys((_T.detach, torch.detach), _detached),
    **dict.fromkeys(_SHAPES, _shaped),
    **dict.fromkeys((*_CASTS, *_PRODUCTS, *_QUOTIENTS, _T.tanh, torch.tanh), _elementwise),
}
