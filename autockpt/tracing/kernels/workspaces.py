"""Memory that kernels take from PyTorch's allocator and give back before they return.

Recording sees what goes into an op and what comes out. Rules stand here for kernels that nearly every model runs. Those
of CPUs are ATen's own: attention, norms, copies of what is not contiguous or of another type. What oneDNN takes for a
convolution or a recurrent layer depends on shapes, types and the processor, up to 250 times the weights, so each is
called once on zeros. Its 16-bit products take up to a few megabytes, which are not counted. A search on a CPU measures
its candidates in any case, so that is enough.

The rules of CUDA were read off the sources of torch 2.11 to 2.13; not measured on a device yet. Not among them: what
cuDNN takes for convolutions (its heuristics decide), and scratch pads of sorts and scans of a few kilobytes. Other
devices have other kernels: there only what ops hold that are put together from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from autockpt.devices.cpu import allocator_peak
from autockpt.tracing.kernels.operators import Argument, Operator, flat_tensors
from autockpt.tracing.kernels.quantised_kernels import CUDA_RULES, cpu_quantised

# One convolution, and all of a tracer. Limits on work and not on time, so that a busy machine predicts the same bytes.
MOST_FLOPS, MOST_FLOPS_TOGETHER = 3e10, 2e11
ESTIMATED = "What the largest convolutions take while they run is estimated."
_TRIED = frozenset(("convolution", "convolution_backward", "mkldnn_rnn_layer_backward"))
_CONDITIONS = frozenset({"condition", "mask"})
_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072
FLOAT, LONG = 4, 8
NO_REDUCTION = 0  # at::Reduction


def workspace_bytes(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], device_kind: str = "cpu", threads: int = 1
) -> int:
    """Bytes beyond inputs and outputs that a kernel holds at its worst moment; 0 where none are known of.

    ``threads``: of the CPU.
    """
    argument, base = operator.arguments(args, kwargs), operator.base
    if device_kind == "cpu" and (of_threads := _CPU_RULES.get(base)) is not None:
        return max(of_threads(argument, threads), 0)
    if (rule := _RULES.get(device_kind, _PUT_TOGETHER).get(base)) is not None:
        return max(rule(argument), 0)
    return _converted_operands(operator, args, kwargs) if device_kind == "cpu" and operator.pointwise else 0


def trial_of(operator: Operator, func: Any, args: tuple[Any, ...]) -> Callable[[], int] | None:
    """What measures a CPU kernel's bytes by calling it once on zeros; None where rules are enough."""
    if operator.base not in _TRIED:
        return None
    # no tensor is kept: that would keep memory alive which a plain step releases
    layouts = [(a.size(), a.stride(), a.dtype) if isinstance(a, Tensor) else None for a in args]
    plain = [None if isinstance(a, Tensor) else a for a in args]

    def trial() -> int:
        results: list[Any] = []
        with torch.no_grad():
            made = [None if at is None else torch.empty_strided(at[0], at[1], dtype=at[2]).zero_() for at in layouts]
            call = [other if tensor is None else tensor for tensor, other in zip(made, plain, strict=True)]
            most = allocator_peak(lambda: results.append(func(*call)))
        return max(most - sum(t.untyped_storage().nbytes() for t in flat_tensors(results)), 0)

    return trial


def _convolution(argument: Argument, threads: int) -> int:
    """About what oneDNN's blocked copies take, of convolutions that are too large to be called."""
    x, other = argument("input"), argument("grad_output")
    return x.nbytes + (argument("weight") if other is None else other).nbytes


def _batch_norm_backward(argument: Argument, threads: int) -> int:
    """The input's gradient is allocated twice."""
    mask = argument("output_mask")
    return argument("input").nbytes if mask is None or mask[0] else 0


def _contiguous_copies(*names: str) -> Callable[[Argument, int], int]:
    """The kernel copies these inputs where they are not contiguous."""

    def rule(argument: Argument, threads: int) -> int:
        tensors = [argument(name) for name in names]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and not t.is_contiguous())

    return rule


def _layer_norm_backward(argument: Argument, threads: int) -> int:
    """Sums of the parameters' gradients per thread (``cpu/layer_norm_kernel.cpp``), and contiguous copies."""
    x, mask = argument("input"), argument("output_mask")
    sums = 0
    if mask is None or mask[1] or mask[2]:
        sums = 2 * threads * math.prod(argument("normalized_shape")) * x.element_size()
    return _contiguous_copies("input", "grad_out")(argument, threads) + sums


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
    if len({t.dtype for t in operands}) < 2:
        return 0
    # the type that elementwise kernels compute in; tensors without dimensions count less
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    converted = [t for t in operands if t.dim() and t.dtype is not common]
    converted += [t for t in operands[: operator.mutates] if t.dtype is not common]
    return sum(t.numel() * common.itemsize for t in converted)


def _rows_without_any(argument: Argument) -> int:
    """Of ``_safe_softmax``, whose mask of the rows themselves is a block by itself, and a small one."""
    return argument("self").numel()


def _loss_tensors(reduced: int, unreduced: int = 0) -> Callable[[Argument], int]:
    """Elementwise losses hold so many tensors as large as their input where they reduce it, and where they do not."""

    def rule(argument: Argument) -> int:
        x, target = argument("self"), argument("target")
        count = math.prod(torch.broadcast_shapes(x.size(), target.size()))
        held = unreduced if argument("reduction") == NO_REDUCTION else reduced
        return held * count * torch.promote_types(x.dtype, target.dtype).itemsize

    return rule


def _flash_backward(argument: Argument, *, repeats: bool = True) -> int:
    """fp32 sums of the queries' gradient and of the rows, and gradients per query head where heads are shared.

    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd``. Of cuDNN's own plan no more is
    known than the sums that it cannot do without.
    """
    query, key = argument("query"), argument("key")
    batch, heads, length, head = query.shape
    rows = up_to(length, 128)
    padded = up_to(head, 32 if head <= 128 else 64)
    nbytes = batch * heads * rows * (padded + 1) * FLOAT
    if repeats and key.size(1) != heads:
        nbytes += 2 * batch * heads * key.size(2) * head * query.element_size()
    return nbytes


def _efficient_backward(argument: Argument) -> int:
    """Row sums, and fp32 sums of the queries' gradient for 16-bit types.

    ``mem_eff_attention/kernel_backward.h``: ``workspace_elements_gq`` and ``delta``.
    """
    query = argument("query")
    batch, heads, length, head = query.shape
    nbytes = batch * heads * up_to(length, 32) * FLOAT
    if query.element_size() < FLOAT:
        nbytes += batch * heads * up_to(length, 64) * up_to(head, 64) * FLOAT
    return nbytes


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
    return copied + 4 * count * LONG + runs * grad.size(-1) * FLOAT


def _logsumexp(argument: Argument) -> int:
    """Exponentials, and the maxima besides the result (``native/ReduceOps.cpp``)."""
    x = argument("self")
    reduced = math.prod(x.size(dim) for dim in argument("dim")) if x.dim() else 1
    return x.nbytes + x.nbytes // max(reduced, 1)


def _copied_matrices(*names: str) -> Callable[[Argument], int]:
    """Matrices that lie neither by rows nor by columns, which are copied before a library multiplies them.

    ``aten/src/ATen/native/cuda/Blas.cpp``, ``prepare_matrix_for_cublas``, and ``native/LinearAlgebra.cpp``. Such is
    the gradient of a sum: one number in memory, expanded to a matrix.
    """

    def rule(argument: Argument) -> int:
        return sum(x.nbytes for x in map(argument, names) if not _has_leading_dimension(x))

    return rule


def _has_leading_dimension(matrix: Tensor) -> bool:
    if matrix.layout is not torch.strided or matrix.dim() < 2:  # which another library multiplies, or none
        return True
    (rows, columns), (down, along) = matrix.size()[-2:], matrix.stride()[-2:]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


_CPU_RULES: dict[str, Callable[[Argument, int], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm": _contiguous_copies("input"),
    "native_layer_norm_backward": _layer_norm_backward,
    "_softmax": _contiguous_copies("self"),
    "_log_softmax": _contiguous_copies("self"),
    "_softmax_backward_data": _contiguous_copies("grad_output", "output"),
    "_log_softmax_backward_data": _contiguous_copies("grad_output", "output"),
    "nll_loss_forward": _contiguous_copies("self", "weight"),
    "embedding_dense_backward": _contiguous_copies("grad_output"),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "gemm_4bit": cpu_quantised,
}
# from the same ops on every device
_PUT_TOGETHER: dict[str, Callable[[Argument], int]] = {
    "_safe_softmax": _rows_without_any,
    "binary_cross_entropy_with_logits": _loss_tensors(2, 1),
    "logsumexp": _logsumexp,
}
_CUDA_RULES: dict[str, Callable[[Argument], int]] = {
    "bmm": _copied_matrices("self", "mat2"),
    "baddbmm": _copied_matrices("batch1", "batch2"),
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": partial(_flash_backward, repeats=False),
    "embedding_dense_backward": _embedding_backward,
    **CUDA_RULES,
}
_COMMON = {
    **_PUT_TOGETHER,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss_tensors(1)),
    "mm": _copied_matrices("self", "mat2"),
    "addmm": _copied_matrices("mat1", "mat2"),
}
_RULES = {"cpu": _COMMON, "cuda": _COMMON | _CUDA_RULES}
