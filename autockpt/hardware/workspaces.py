"""Memory that kernels take from PyTorch's allocator and give back before they return.

Recording sees what goes into an op and what comes out; a few kernels need more while they run, convolutions most of
all: oneDNN copies input, weight and output to blocked layouts of 16 channels. What oneDNN takes is measured where that
is possible (``scratch.py``); its rules here, read off the allocator's events on x86-64 with AVX-512, stand in for the
rest. The other rules are ATen's own and hold on every CPU.

Those of accelerators are in ``accelerator_workspaces.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from autockpt.hardware.operators import Argument, Operator, channels_last
from autockpt.hardware.quantised_kernels import cpu_quantised

_BLOCK = 16  # channels
_UNBLOCKED_INPUT = 3  # channels up to which the input of a convolution is taken as it is


def workspace_bytes(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], threads: int = 1) -> int:
    """Bytes beyond inputs and outputs that the CPU kernel holds at its worst moment; 0 where none are known of."""
    rule = _RULES.get(operator.base)
    if rule is None:
        return _converted_operands(operator, args, kwargs) if operator.pointwise else 0
    return max(rule(operator.arguments(args, kwargs), threads), 0)


def _convolution(argument: Argument, threads: int) -> int:
    x, weight = argument("input"), argument("weight")
    size = _output_size(argument, x, weight)
    y = math.prod(size) * x.element_size()
    if not _uses_onednn(argument, x, weight, threads):
        return _columns(argument, x, weight, size)
    if channels_last(x):
        return 2 * weight.nbytes
    blocked_x, blocked_w, blocked_y = _blocked(x, weight, size)
    return max(blocked_x + blocked_w + blocked_y - y, blocked_y)


def _convolution_backward(argument: Argument, threads: int) -> int:
    x, weight, grad = argument("input"), argument("weight"), argument("grad_output")
    mask = argument("output_mask") or [True, True, True]
    grad_x = x.nbytes if mask[0] else 0
    grad_w = weight.nbytes if mask[1] else 0
    kept = grad_x + grad_w
    if not _uses_onednn(argument, x, weight, threads):
        columns = _columns(argument, x, weight, tuple(grad.shape))
        return columns - (0 if mask[1] else grad_w) if columns else 0
    if channels_last(x):
        return 2 * weight.nbytes
    blocked_x, blocked_w, blocked_grad = _blocked(x, weight, tuple(grad.shape))
    blocked_x = blocked_x or x.nbytes
    peak = 0
    if mask[0]:
        peak = max(blocked_grad + blocked_w + blocked_x, blocked_x + grad_x)
    if mask[1]:
        peak = max(peak, grad_x + blocked_x + blocked_grad + blocked_w, grad_x + blocked_w + grad_w)
    return peak - kept


def _batch_norm_backward(argument: Argument, threads: int) -> int:
    """The input's gradient is allocated twice, unless one has channels last and the other not."""
    x, grad, mask = argument("input"), argument("grad_out"), argument("output_mask")
    if channels_last(x) != channels_last(grad):
        return 2 * x.nbytes if channels_last(x) and x.dtype in _SIXTEEN_BIT else 0  # computed in fp32
    return x.nbytes if mask is None or mask[0] else 0


def _contiguous_copies(*names: str) -> Callable[[Argument, int], int]:
    """The kernel copies these inputs where they are not contiguous."""

    def rule(argument: Argument, threads: int) -> int:
        tensors = [argument(name) for name in names]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and not t.is_contiguous())

    return rule


def _safe_softmax(argument: Argument, threads: int) -> int:
    """A mask of the rows that are all minus infinity."""
    x = argument("self")
    return x.numel() + x.numel() // max(x.size(argument("dim")), 1)


def _roll(argument: Argument, threads: int) -> int:
    """Rolled one dimension at a time."""
    x = argument("self")
    return x.nbytes if len(argument("shifts")) > 1 else 0


def _scatter(argument: Argument, threads: int) -> int:
    """16-bit types are scattered into an fp32 copy of the result."""
    x = argument("self")
    return FLOAT * x.numel() if x.dtype in _SIXTEEN_BIT else 0


def _gather(argument: Argument, threads: int) -> int:
    """Likewise, unless there is but one dimension."""
    x, index = argument("self"), argument("index")
    return FLOAT * index.numel() if x.dtype in _SIXTEEN_BIT and x.dim() > 1 else 0


def _gelu_backward(argument: Argument, threads: int) -> int:
    """oneDNN's kernel wants a dense gradient and has a result of its own, copied where layouts differ."""
    grad, x = argument("grad_output"), argument("self")
    mixed = not grad.is_contiguous() and x.is_contiguous() and argument("approximate") in (None, "none")
    return 2 * x.nbytes if mixed else 0


def _layer_norm_backward(argument: Argument, threads: int) -> int:
    """Sums of the parameters' gradients per thread (``cpu/layer_norm_kernel.cpp``), and contiguous copies."""
    x, mask = argument("input"), argument("output_mask")
    sums = 0
    if mask is None or mask[1] or mask[2]:
        sums = 2 * threads * math.prod(argument("normalized_shape")) * x.element_size()
    return _contiguous_copies("input", "grad_out")(argument, threads) + sums


def _group_norm_backward(argument: Argument, threads: int) -> int:
    """Two sums per channel and sample, in fp32 at least (``cpu/group_norm_kernel.cpp``)."""
    x = argument("input")
    return 2 * x.size(0) * x.size(1) * max(x.element_size(), 4)


def _ctc_loss_backward(argument: Argument, threads: int) -> int:
    """The backward variables, as many as the forward ones (``native/LossCTC.cpp``, ``log_beta``)."""
    return argument("log_alpha").nbytes


def _wider_reduction(argument: Argument, threads: int) -> int:
    """A sum in another type than its input's reads a converted copy; whole numbers add up in int64."""
    x, dtype = argument("self"), argument("dtype")
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    dtype = dtype or (torch.int64 if whole else x.dtype)
    return x.numel() * dtype.itemsize if dtype is not x.dtype and x.dim() else 0


def _sum(argument: Argument, threads: int) -> int:
    """16-bit types are summed up in fp32 where what is reduced does not lie together (``should_use_acc_buffer``)."""
    x = argument("self")
    if x.dtype not in _SIXTEEN_BIT or argument("dtype") is torch.float32:
        return _wider_reduction(argument, threads)
    reduced = sorted((x.stride(dim), x.size(dim)) for dim in _reduced(argument) if x.size(dim) > 1)
    together = all(step * size == following for (step, size), (following, _) in pairwise(reduced))
    return 0 if together else _in_fp32(argument)


def _mean(argument: Argument, threads: int) -> int:
    """16-bit types are summed up in fp32 (``native/ReduceOps.cpp``)."""
    x = argument("self")
    if x.dtype not in _SIXTEEN_BIT or argument("dtype") is torch.float32:
        return _wider_reduction(argument, threads)
    return _in_fp32(argument)


def _in_fp32(argument: Argument) -> int:
    """Input and result of a reduction."""
    x = argument("self")
    return FLOAT * (x.numel() + x.numel() // max(math.prod(x.size(dim) for dim in _reduced(argument)), 1))


def _reduced(argument: Argument) -> Sequence[int]:
    """The dimensions that a reduction goes over: where none are given, all."""
    return argument("dim") or range(argument("self").dim())


def _loss(reduced: int, unreduced: int = 0) -> Callable[[Argument, int], int]:
    """Elementwise losses hold so many tensors as large as their input where they reduce it, and where they do not."""

    def rule(argument: Argument, threads: int) -> int:
        x, target = argument("self"), argument("target")
        dtype, converted = torch.promote_types(x.dtype, target.dtype), _converted([x, target])
        count = math.prod(torch.broadcast_shapes(x.size(), target.size()))
        if argument("reduction") == NO_REDUCTION:
            return unreduced * count * dtype.itemsize + converted
        mean = argument("reduction") in (None, _MEAN) and dtype in _SIXTEEN_BIT
        # converted by two iterators, one for the shape of the result and one for the kernel
        return (reduced * dtype.itemsize + (FLOAT if mean else 0)) * count + 2 * converted

    return rule


def _loss_backward(argument: Argument, threads: int) -> int:
    x = argument("self")
    return _converted([x, argument("target"), argument("grad_output")], x)


def soft_margin_backward(argument: Argument, threads: int = 1) -> int:
    """Put together from elementwise ops (``native/Loss.cpp``)."""
    return 2 * argument("self").nbytes


def _nll(argument: Argument, threads: int) -> int:
    """Contiguous copies, where it reduces."""
    if argument("reduction") == NO_REDUCTION:
        return 0
    return _contiguous_copies("self", "weight")(argument, threads)


def logsumexp(argument: Argument, threads: int = 1) -> int:
    """Exponentials, and the maxima beside the result (``native/ReduceOps.cpp``)."""
    x = argument("self")
    reduced = math.prod(x.size(dim) for dim in argument("dim")) if x.dim() else 1
    return x.nbytes + x.nbytes // max(reduced, 1)


def distances(argument: Argument, threads: int = 1) -> int:
    """One product gives them, of copies with two more columns."""
    points, others = argument("x1"), argument("x2")
    return sum(x.nbytes // max(x.size(-1), 1) * (x.size(-1) + 2) for x in (points, others))


def _attention(argument: Argument, threads: int) -> int:
    """Blocks of scores and results per thread: ``cpu/FlashAttentionKernel.cpp``, ``cpu_flash_attention``."""
    query = argument("query")
    rows, keys, item = *_attention_blocks(query, argument("key")), query.element_size()
    numbers = rows * (keys + 2 + query.size(-1))
    return threads * (numbers * max(item, 4) + (rows * keys * item if item == 2 else 0))


def _attention_backward(argument: Argument, threads: int) -> int:
    """Likewise, ``cpu_flash_attention_backward``; and the gradient that comes in with heads inside."""
    query, grad = argument("query"), argument("grad_out")
    rows, keys, item = *_attention_blocks(query, argument("key")), query.element_size()
    nbytes = threads * ((2 * keys + 1) * rows * max(item, 4) + (2 * rows * keys * item if item == 2 else 0))
    return nbytes + (0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes)


def _attention_blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Queries and keys of a block."""
    length = query.size(2)
    return min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, key.size(2))


def _converted_operands(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Operands of another type than the common one are copied before elementwise kernels run on a CPU.

    ``aten/src/ATen/TensorIterator.cpp``, ``compute_types``; in place, the result is computed in a temporary too.
    """
    values = {name: operator.argument(name, args, kwargs) for name in operator.positions}
    operands = [v for name, v in values.items() if isinstance(v, Tensor) and name not in _CONDITIONS]
    return _converted(operands, operands[0] if operator.mutates else None)


def _converted(operands: list[Tensor], written: Tensor | None = None) -> int:
    """Bytes of operands in the type they have in common, where that is not their own."""
    if len({t.dtype for t in operands}) < 2:
        return 0
    # the type that elementwise kernels compute in; tensors without dimensions count less
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    nbytes = sum(t.numel() * common.itemsize for t in operands if t.dim() and t.dtype is not common)
    if written is not None and written.dtype is not common:
        nbytes += written.numel() * common.itemsize
    return nbytes


_CONDITIONS = frozenset({"condition", "mask"})
FLOAT, LONG = 4, 8
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
NO_REDUCTION, _MEAN = 0, 1  # at::Reduction


_RULES: dict[str, Callable[[Argument, int], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm": _contiguous_copies("input"),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_softmax": _contiguous_copies("self"),
    "_log_softmax": _contiguous_copies("self"),
    "_softmax_backward_data": _contiguous_copies("grad_output", "output"),
    "_log_softmax_backward_data": _contiguous_copies("grad_output", "output"),
    "gelu_backward": _gelu_backward,
    "sum": _sum,
    "mean": _mean,
    "cumsum": _wider_reduction,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "embedding_dense_backward": _contiguous_copies("grad_output"),
    "roll": _roll,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_": _scatter,
    "scatter_add": _scatter,
    "scatter_add_": _scatter,
    "mse_loss": _loss(1),
    "mse_loss_backward": _loss_backward,
    "smooth_l1_loss": _loss(1),
    "smooth_l1_loss_backward": _loss_backward,
    "huber_loss": _loss(1),
    "binary_cross_entropy": _loss(0),
    "binary_cross_entropy_with_logits": _loss(2, 1),
    "soft_margin_loss": _loss(0),
    "soft_margin_loss_backward": soft_margin_backward,
    "nll_loss_forward": _nll,
    "logsumexp": logsumexp,
    "_euclidean_dist": distances,
    "gemm_4bit": cpu_quantised,
    "_safe_softmax": _safe_softmax,
}


def _uses_onednn(argument: Argument, x: Tensor, weight: Tensor, threads: int) -> bool:
    """PyTorch's choice between oneDNN and its own convolution."""
    if argument("transposed") or not torch.backends.mkldnn.is_available():
        return False
    kernel = weight.shape[2:]
    if x.dtype is not torch.float32:
        supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
        return x.dtype in supported and bool(getattr(torch.ops.mkldnn, supported[x.dtype])())
    widened = any(s != 1 for s in argument("stride")) or any(d != 1 for d in argument("dilation"))
    worthwhile = widened or x.size(0) >= 16 or any(k != 1 for k in kernel) or threads > 1
    large = argument("groups") > 1 or all(k > 3 for k in kernel) or x.size(0) > 1 or x.numel() > 20480
    return worthwhile and large


def _blocked(x: Tensor, weight: Tensor, output: Sequence[int]) -> tuple[int, int, int]:
    """Bytes of input, weight and output in blocked layouts; an input of few channels is not copied (0)."""
    itemsize = x.element_size()
    few = x.size(1) <= _UNBLOCKED_INPUT
    depthwise = weight.size(1) == 1
    blocked_x = 0 if few else up_to(x.size(1), _BLOCK) * (x.numel() // x.size(1)) * itemsize
    inner = weight.size(1) if few or depthwise else up_to(weight.size(1), _BLOCK)
    blocked_w = up_to(weight.size(0), _BLOCK) * inner * math.prod(weight.shape[2:]) * itemsize
    blocked_y = up_to(output[1], _BLOCK) * (math.prod(output) // output[1]) * itemsize
    return blocked_x, blocked_w, blocked_y


def _columns(argument: Argument, x: Tensor, weight: Tensor, output: Sequence[int]) -> int:
    """PyTorch's own convolution unfolds its input, unless each pixel is taken once and alone."""
    plain = all(k == 1 for k in weight.shape[2:]) and all(s == 1 for s in argument("stride"))
    if plain or argument("transposed"):
        return 0
    pixels = math.prod(output[2:])
    return x.size(0) * math.prod(weight.shape[1:]) * pixels * x.element_size()


def _output_size(argument: Argument, x: Tensor, weight: Tensor) -> tuple[int, ...]:
    stride, padding, dilation = argument("stride"), argument("padding"), argument("dilation")
    if argument("transposed"):
        return (x.size(0), weight.size(1) * argument("groups"), *x.shape[2:])  # only asked for its columns: none
    spatial = []
    for i, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        at = [values[i] if i < len(values) else values[-1] for values in (stride, padding, dilation)]
        spatial.append((size + 2 * at[1] - at[2] * (kernel - 1) - 1) // at[0] + 1)
    return (x.size(0), weight.size(0), *spatial)


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple
