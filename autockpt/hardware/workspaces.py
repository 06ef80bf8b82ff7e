"""Memory that kernels take from PyTorch's allocator and give back before they return.

Recording sees what goes into an op and what comes out; a few kernels need more while they run, convolutions most of
all: oneDNN copies input, weight and output to blocked layouts of 16 channels. What oneDNN takes is measured where that
is possible (``scratch.py``); its rules here, read off the allocator's events on x86-64 with AVX-512, stand in for the
rest. The other rules are ATen's own and hold on every CPU.

CUDA's kernels have rules of their own, read off the sources of torch 2.11 to 2.13; not measured on a device yet. Not
among them: what cuDNN takes for convolutions (its heuristics decide), and scratch pads of sorts and scans of a few
kilobytes. Other devices have other kernels: there only what ops hold that are put together from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from autockpt.hardware.operators import Argument, Operator, channels_last
from autockpt.hardware.quantised_kernels import CUDA_RULES, cpu_quantised

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
    """The input's gradient is allocated twice."""
    x, mask = argument("input"), argument("output_mask")
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


def _scatter_add(argument: Argument, threads: int) -> int:
    """16-bit types are added up in a fp32 copy of the result."""
    x = argument("self")
    return 4 * x.numel() if x.dtype in (torch.bfloat16, torch.float16) else 0


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
    types = {t.dtype for t in operands if t.dim()}
    if len(types) < 2:
        return 0
    # the type that elementwise kernels compute in; tensors without dimensions count less
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    nbytes = sum(t.numel() * common.itemsize for t in operands if t.dim() and t.dtype is not common)
    if operator.mutates and operands[0].dtype is not common:
        nbytes += operands[0].numel() * common.itemsize
    return nbytes


_CONDITIONS = frozenset({"condition", "mask"})


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
    "sum": _wider_reduction,
    "mean": _wider_reduction,
    "cumsum": _wider_reduction,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "embedding_dense_backward": _contiguous_copies("grad_output"),
    "roll": _roll,
    "scatter_add": _scatter_add,
    "scatter_add_": _scatter_add,
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
    blocked_x = 0 if few else _up(x.size(1), _BLOCK) * (x.numel() // x.size(1)) * itemsize
    inner = weight.size(1) if few or depthwise else _up(weight.size(1), _BLOCK)
    blocked_w = _up(weight.size(0), _BLOCK) * inner * math.prod(weight.shape[2:]) * itemsize
    blocked_y = _up(output[1], _BLOCK) * (math.prod(output) // output[1]) * itemsize
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


_FLOAT, _LONG = 4, 8
_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072


def accelerator_workspace_bytes(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], cuda: bool = True
) -> int:
    """Bytes beyond inputs and outputs that the kernel of CUDA, or of another accelerator, holds at its worst moment.

    0 where none are known of.
    """
    argument = operator.arguments(args, kwargs)
    if operator.base == "_safe_softmax":  # put together from the same ops on every device
        return argument("self").numel()  # the rows' own mask is a block by itself, and a small one
    if cuda and (own := _CUDA_RULES.get(operator.base)):
        return max(own(argument), 0)
    return 0


def _flash_backward(argument: Argument) -> int:
    """fp32 sums of the queries' gradient and of the rows, and gradients per query head where heads are shared.

    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd``.
    """
    query, key = argument("query"), argument("key")
    batch, heads, length, head = query.shape
    rows = _up(length, 128)
    padded = _up(head, 32 if head <= 128 else 64)
    nbytes = batch * heads * rows * (padded + 1) * _FLOAT
    if key.size(1) != heads:
        nbytes += 2 * batch * heads * key.size(2) * head * query.element_size()
    return nbytes


def _efficient_backward(argument: Argument) -> int:
    """Row sums, and fp32 sums of the queries' gradient for 16-bit types.

    ``mem_eff_attention/kernel_backward.h``: ``workspace_elements_gq`` and ``delta``.
    """
    query = argument("query")
    batch, heads, length, head = query.shape
    nbytes = batch * heads * _up(length, 32) * _FLOAT
    if query.element_size() < _FLOAT:
        nbytes += batch * heads * _up(length, 64) * _up(head, 64) * _FLOAT
    return nbytes


def _cudnn_backward(argument: Argument) -> int:
    """cuDNN's own plan decides; the fp32 sums that it cannot do without are counted."""
    query = argument("query")
    batch, heads, length, head = query.shape
    return batch * heads * _up(length, 128) * (_up(head, 32) + 1) * _FLOAT


def _embedding_backward(argument: Argument) -> int:
    """Sorted indices and their places, and fp32 partial sums of each run of equal tokens.

    ``EmbeddingBackwardKernel.cu``; how many runs there are depends on the tokens, so this is the most there can be.
    """
    grad, indices, rows = argument("grad_output"), argument("indices"), argument("num_weights")
    count = indices.numel()
    copied = 0 if grad.is_contiguous() else grad.nbytes
    if count <= _FEW_INDICES:
        return copied
    runs = min(count, int(rows)) + -(-count // _ROWS_PER_THREAD)
    return copied + 4 * count * _LONG + runs * grad.size(-1) * _FLOAT


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_CUDA_RULES: dict[str, Callable[[Argument], int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "embedding_dense_backward": _embedding_backward,
    **CUDA_RULES,
}
