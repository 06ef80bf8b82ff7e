"""What is done to logits that are not there yet without making them: views and casts of rows, steps element by element,
and cross-entropy over chunks of rows.

Each function takes the source of the logits and the arguments of a tensor's method or of a function of torch, and
answers NotImplemented for what needs the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autockpt.checkpointing.autocast import AutocastState
from autockpt.checkpointing.fingerprint import quietly
from autockpt.policies.headcall import REDUCTIONS, ChunkedLoss, CrossEntropy, Elementwise

if TYPE_CHECKING:
    from autockpt.policies.lazylogits import LazyLogits, LogitsSource


def _shaped(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Another shape of the rows. In plain training it may share memory with the original, as here."""

    def apply(source: LogitsSource, *args: Any, **more: Any) -> Any:
        try:
            with quietly(), torch._C.DisableTorchFunction():
                shape = function(torch.empty(source.shape, device="meta"), *args, **more).shape
        except (RuntimeError, TypeError, IndexError):  # PyTorch says what is wrong of the logits themselves
            return NotImplemented
        if shape[-1:] != (source.vocabulary,):
            return NotImplemented
        return source.derive(hidden=source.hidden.reshape(*shape[:-1], source.hidden.shape[-1]))

    return apply


def _without_options(step: Callable[[LogitsSource], Any]) -> Callable[..., Any]:
    return lambda source, **more: NotImplemented if more else step(source)


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
        with quietly(), torch._C.DisableTorchFunction():
            left = [torch.empty((*hidden.shape[:-1], size), device="meta")[index].shape[-1:] for size in sizes]
    except IndexError:
        return NotImplemented
    if left != [(size,) for size in sizes]:
        return NotImplemented
    rows = hidden[index]
    return source.derive(hidden=rows) if rows.dim() >= 2 else NotImplemented


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(source: LogitsSource) -> LazyLogits:
        if dtype == source.dtype:  # in plain training the same memory
            return source.derive()
        return _step(source, lambda logits: logits.to(dtype), dtype)

    return _without_options(cast)


def _to(source: LogitsSource, *args: Any, **kwargs: Any) -> Any:
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    except (TypeError, RuntimeError):  # that of `copy`
        return NotImplemented
    if memory_format is not None or (device is not None and device != source.hidden.device):
        return NotImplemented
    dtype = dtype or source.dtype
    return _cast(dtype)(source) if dtype.is_floating_point else NotImplemented


def _by_number(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(source: LogitsSource, other: Any, **more: Any) -> Any:
        if more or type(other) not in (int, float):
            return NotImplemented
        return _step(source, lambda logits: function(logits, other), source.dtype)

    return apply


def _step(source: LogitsSource, step: Elementwise, dtype: torch.dtype) -> LazyLogits:
    return source.derive(steps=(*source.steps, step), dtype=dtype)


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
    casts, passing, watch = AutocastState([hidden.device.type]), family.way(source), family.watched(hidden)
    settings = CrossEntropy(source.call, source.steps, reduction, options, casts, passing, watch)
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
    _T.contiguous: _without_options(lambda source: source.derive(hidden=source.hidden.contiguous())),
    _T.__getitem__: _index,
    _T.float: _cast(torch.float32),
    _T.double: _cast(torch.float64),
    _T.half: _cast(torch.float16),
    _T.bfloat16: _cast(torch.bfloat16),
    _T.to: _to,
    **dict.fromkeys((_T.mul, torch.mul, _T.__mul__, _T.__rmul__), _by_number(torch.mul)),
    **dict.fromkeys((_T.div, torch.div, _T.true_divide, torch.true_divide, _T.__truediv__), _by_number(torch.div)),
    **dict.fromkeys((_T.tanh, torch.tanh), _without_options(lambda source: _step(source, torch.tanh, source.dtype))),
}
