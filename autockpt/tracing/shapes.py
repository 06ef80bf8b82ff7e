"""Infer an op's result (sizes, strides, dtypes) without running its kernel, by fake tensors.

PyTorch's shape inference is wrong about some of its own kernels; what these really return was found by comparing the
two over operators, dtypes and memory layouts on torch 2.13. Strides matter because everything that follows inherits
them, dtypes because they are bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autockpt.interpreter import patched
from autockpt.tracing.kernels.operators import Argument, Operator, channels_last, count_flops, flat_tensors
from autockpt.tracing.kernels.signature import contiguous_stride


class TensorLayout(NamedTuple):
    """The layout of an inferred tensor: sizes and strides in elements, and the bytes of its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def dense(size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> TensorLayout:
    """The layout of a tensor that fills its storage; contiguous where no strides are given."""
    stride = contiguous_stride(size) if stride is None else tuple(stride)
    return TensorLayout(tuple(size), stride, dtype, math.prod(size) * dtype.itemsize)


# Inference goes by decompositions whose operands stand in another order, and the first dense operand decides strides.
_ELEMENTWISE = frozenset(
    "elu_backward floor_divide hardsigmoid_backward hardswish_backward hardtanh_backward logical_and logical_or "  # noqa: SIM905
    "logit_backward native_dropout_backward softplus_backward xlogy".split()
)
_ELEMENTWISE_REVERSED = frozenset(("threshold_backward", "leaky_relu_backward"))


def _like_iterator(tree: TensorLayout, tensors: Sequence[Tensor]) -> TensorLayout:
    """Strides as the kernels' own iterator lays them out for these operands in this order."""
    if not 2 <= len(tensors) <= 3:
        return tree
    operands = [torch.empty_strided(t.size(), t.stride(), dtype=torch.float32, device="meta") for t in tensors]
    result = torch.add(*operands) if len(operands) == 2 else torch.addcmul(*operands)
    return tree._replace(stride=tuple(result.stride())) if tuple(result.size()) == tree.size else tree


def _norm_statistics(tree: Any, argument: Argument) -> Any:
    """CPU kernels with a 16-bit input and 32-bit weights, as under autocast, keep mean and deviation in 32 bits."""
    weight, x = argument("weight"), argument("input")
    if weight is None or weight.dtype == x.dtype:
        return tree
    size = weight.dtype.itemsize
    return (tree[0], *(t._replace(dtype=weight.dtype, nbytes=t.nbytes // t.dtype.itemsize * size) for t in tree[1:]))


def _batch_norm(tree: Any, argument: Argument) -> Any:
    return _norm_statistics((_suggested(argument("input")), *tree[1:]), argument)


def _batch_norm_backward(tree: Any, argument: Argument) -> Any:
    """The gradient has the memory format of the input, not of the gradient that came in."""
    return tree if tree[0] is None else (_suggested(argument("input")), *tree[1:])


def _group_norm_backward(argument: Argument) -> Any:
    x, weight, mask = argument("input"), argument("weight"), argument("output_mask")
    dtype = x.dtype if weight is None else weight.dtype
    parameter = dense((x.size(1),), (1,), dtype)
    return tuple(
        layout if wanted else None for layout, wanted in zip((_suggested(x), parameter, parameter), mask, strict=True)
    )


def _all_contiguous(tree: Any, argument: Argument) -> Any:
    if isinstance(tree, TensorLayout):
        return dense(tree.size, None, tree.dtype)
    return tuple(_all_contiguous(item, argument) for item in tree)


def _first_contiguous(tree: Any, argument: Argument) -> Any:
    return (_all_contiguous(tree[0], argument), *tree[1:]) if isinstance(tree[0], TensorLayout) else tree


def _suggested(x: Tensor) -> TensorLayout:
    """A new tensor in the memory format that ``x`` suggests: channels last or contiguous."""
    shape = torch.empty(x.size(), device="meta", memory_format=channels_last(x) or torch.contiguous_format)
    return dense(x.size(), shape.stride(), x.dtype)


def _like_input(tree: TensorLayout, argument: Argument) -> TensorLayout:
    """Contiguous, in the input's type."""
    return dense(tree.size, None, argument("self").dtype)


def _cross_entropy(tree: TensorLayout, argument: Argument) -> TensorLayout:
    """Strides of its input where it stays as large."""
    like = torch.empty_like(argument("self"), device="meta")
    whole = tree.size == like.size()
    return dense(like.size(), like.stride(), like.dtype) if whole else _reduced_in_place(tree, argument)


def _reduced_in_place(tree: TensorLayout, argument: Argument) -> TensorLayout:
    """Losses that shrink the unreduced result to its mean or sum: the memory stays as large as it was."""
    target = argument("target")
    count = math.prod(torch.broadcast_shapes(argument("self").size(), target.size()))
    return tree._replace(nbytes=max(tree.nbytes, count * tree.dtype.itemsize))


def _recurrent_layer(tree: Any, argument: Argument) -> Any:
    """oneDNN alone knows the size of the workspace that it keeps for backward, so it is asked: one layer is run."""
    if not argument("train"):
        return tree
    names = [a.name for a in torch.ops.aten.mkldnn_rnn_layer.default._schema.arguments]
    given = [argument(name) for name in names]
    with torch.enable_grad():  # without, there is none
        real = [torch.zeros(a.size(), dtype=a.dtype) if isinstance(a, Tensor) else a for a in given]
        workspace = torch.ops.aten.mkldnn_rnn_layer.default(*real)[3]
    return (*tree[:3], dense(workspace.size(), workspace.stride(), workspace.dtype))


def _grouped_mm(argument: Argument) -> TensorLayout:
    """Grouped matrix products pad their rows to 16 bytes; inference takes bf16 only and forgets the padding."""
    a, b, offsets = argument("self"), argument("mat2"), argument("offs")
    dtype = argument("out_dtype") or a.dtype
    rows, columns = a.size(-2), b.size(-1)
    if a.dim() == b.dim():
        size: tuple[int, ...] = (offsets.size(0) if a.dim() == 2 else a.size(0), rows, columns)
    else:
        size = (rows, columns)
    unit = 16 // dtype.itemsize
    padded = -(-columns // unit) * unit
    stride = (padded, 1) if len(size) == 2 else (rows * padded, padded, 1)
    elements = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if math.prod(size) else 0
    return TensorLayout(size, stride, dtype, elements * dtype.itemsize)


def _ctc_loss(argument: Argument) -> tuple[TensorLayout, TensorLayout]:
    """A loss per sample and the forward variables of the longest target (``native/LossCTC.cpp``)."""
    scores, lengths = argument("log_probs"), argument("target_lengths")
    values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    longest = max(values) if isinstance(values, list) else values
    samples = scores.size(1) if scores.dim() == 3 else 1
    size = (samples, scores.size(0), 2 * longest + 1)
    return dense(size[:1], (1,), scores.dtype), dense(size, None, scores.dtype)


def _int8_quantised(argument: Argument) -> tuple[TensorLayout, TensorLayout, TensorLayout | None]:
    """bitsandbytes' rows in 8 bits, their scales, and columns of outliers where these are looked for: none."""
    x = argument("A")
    rows = x.numel() // x.size(-1)
    outliers = dense((0,), (1,), torch.int64) if argument("threshold") else None
    return dense(x.size(), None, torch.int8), dense((rows,), (1,), torch.float32), outliers


def _int8_product(argument: Argument) -> tuple[TensorLayout, TensorLayout]:
    x, codes, weight = argument("A"), argument("CA"), argument("CB")
    size = (*codes.shape[:-1], weight.size(0))
    return dense(size, None, x.dtype), dense((0,), (1,), x.dtype)


DEPENDS_ON_VALUES = frozenset({"_ctc_loss"})
"""Operators whose layouts must be inferred for every call."""

_CORRECTIONS: dict[str, Callable[[Any, Argument], Any]] = {
    "native_layer_norm": _norm_statistics,
    "native_group_norm": _norm_statistics,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _first_contiguous,
    "_log_softmax_backward_data": _all_contiguous,
    "log_sigmoid_forward": _all_contiguous,
    "roll": lambda tree, of: _suggested(of("self")),  # put together from two slices, as concatenation does it
    "mkldnn_rnn_layer": _recurrent_layer,
    "mse_loss": _reduced_in_place,
    "smooth_l1_loss": _reduced_in_place,
    "soft_margin_loss": _reduced_in_place,
    "binary_cross_entropy": _cross_entropy,
    "binary_cross_entropy_backward": _cross_entropy,
    "mse_loss_backward": _like_input,
    "smooth_l1_loss_backward": _like_input,
    "huber_loss_backward": _like_input,
    "col2im": lambda tree, of: tree._replace(nbytes=max(tree.nbytes, of("self").nbytes)),  # as its input, and shrunk
}
# For operators whose inference fails on valid arguments.
_REPLACEMENTS: dict[str, Callable[[Argument], Any]] = {
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": lambda of: dense(of("log_probs").size(), None, of("log_probs").dtype),
    "_grouped_mm": _grouped_mm,
    "native_group_norm_backward": _group_norm_backward,
    "int8_vectorwise_quant": _int8_quantised,
    "int8_mixed_scaled_mm": _int8_product,
}


# Fake tensors log a traceback for every failure before they raise it. Not silenced by the logger's level: each change
# of one empties the caches of all loggers there are.
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


class Outcome(NamedTuple):
    """An op's result as a tree of ``TensorLayout`` (constants as they are) and its FLOPs, or why there is none."""

    tree: Any = None
    flops: int = 0
    problem: str | None = None


class Shapes:
    """Shape inference; one instance keeps one fake tensor mode."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def infer(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """The outcome of a call. Never raises: ``problem`` says what could not be inferred."""
        argument = operator.arguments(args, kwargs)
        rule = _REPLACEMENTS.get(operator.base)
        if rule is not None:
            tree = rule(argument)
            made = tree_map_only(TensorLayout, _meta, tree, is_leaf=lambda part: isinstance(part, TensorLayout))
            return Outcome(tree, count_flops(operator, args, kwargs, made))
        try:
            with patched(_LOGGER, "disabled", True), self._mode:
                fake_args, fake_kwargs = tree_map_only(Tensor, _fake, (args, kwargs))
                result = func(*fake_args, **fake_kwargs)
            tree = tree_map_only(Tensor, _layout, result)
        except Exception as error:  # a kept exception would keep the tensors of its frames alive
            lines = str(error).splitlines() or [""]
            return Outcome(problem=f"{type(error).__name__}: {lines[0]}"[:200])
        tensors, name = flat_tensors([*args, *kwargs.values()]), operator.base
        if name in _ELEMENTWISE or name in _ELEMENTWISE_REVERSED:
            tree = _like_iterator(tree, tensors if name in _ELEMENTWISE else tensors[::-1])
        elif (correction := _CORRECTIONS.get(name)) is not None:
            tree = correction(tree, argument)
        return Outcome(tree, count_flops(operator, args, kwargs, result))


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor like this one; a fake mode must be active."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _layout(tensor: Tensor) -> TensorLayout:
    nbytes = tensor.untyped_storage().nbytes()
    return TensorLayout(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, int(nbytes))


def _meta(layout: TensorLayout) -> Tensor:
    """A tensor without memory of this layout."""
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
