"""What an op asks of a device, read off its call: FLOPs, bytes moved, elements, and the kind of its kernel.

Bytes are those that a good kernel must move: every tensor once, a tensor that is expanded only where it has memory, a
lookup the rows it takes and not the table, fused attention no matrix of scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from autockpt.schema.graph import Work
from autockpt.tracing.kernels.operators import COLLECTIVES, COPY_IN, IN_PLACE, Argument, Operator, leaves
from autockpt.tracing.kernels.signature import ATTENTION, dtype_name, ranks_of

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "linear", "_grouped_mm", "addbmm"})
_PRODUCTS |= {"int8_mixed_scaled_mm"}  # bitsandbytes', at the rate of its 16-bit result, half that of int8
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution", "convolution_overrideable"})
# The table is an argument, but only rows of it are read.
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index", "take_along_dim"})
_WRITES_ONLY = frozenset(
    "zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange fill_ zero_ zero "  # noqa: SIM905
    "scalar_tensor".split()
)
# Layout copies: fast where both sides are contiguous, else a kernel of their own.
_COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous"})
STRIDED_COPY = "strided_copy"
_MAYBE_IN_PLACE = frozenset(target.split(".")[1] for target in IN_PLACE)
UNTOUCHED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Ops, by ``base_name``, that make or change a tensor without touching its bytes."""


def base_name(target: str) -> str:
    """``aten.add.Tensor`` → ``add``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def work_of(
    operator: Operator, signature: str, argument: Argument, inputs: list[Tensor], outputs: list[Tensor], flops: int
) -> Work:
    """The work of one call, by the tensors that it takes and those that it returned."""
    target = signature.partition("(")[0]
    name = base_name(target)
    if name in UNTOUCHED or _is_view(operator.name, inputs, outputs):
        return Work("none", name)
    if operator.name.startswith(COLLECTIVES):
        return Work("link", name, bytes=_sent(name, argument, inputs, outputs))
    if operator.name == COPY_IN:
        return Work("elements", name, bytes=2 * _sizes(inputs[:-1]))  # the last is the buffer of all ranks
    if target.startswith(ATTENTION):
        return _attention(name, argument, outputs, flops)
    if target.startswith("bitsandbytes.gemm_4bit"):
        return _four_bits(argument, inputs, outputs, flops)
    dtype = next((dtype_name(t.dtype) for t in inputs if _floating(t)), "float32")
    moved, elements = _moved(name, inputs, outputs) + _written_into(operator, argument), _elements(inputs, outputs)
    if flops and (name in _PRODUCTS or name in _CONVOLUTIONS):
        smallest = _smallest_of_convolution(inputs) if name in _CONVOLUTIONS else _smallest(inputs)
        return Work("matrix", name, dtype, flops, moved, elements, smallest)
    if name in _COPIES and not _all_contiguous([*inputs, *outputs]):
        name = STRIDED_COPY
    first = argument("self")
    tensors = len(first) if isinstance(first, list | tuple) else 1
    return Work("elements", name, dtype, flops, moved, elements, tensors=tensors)


def _is_view(target: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """All results share the storage of an argument, and nothing is written.

    An addition that a plain step makes in place has the signature, and the work, of one that it does not.
    """
    name = base_name(target)
    writes = (name.endswith("_") and not name.endswith("__")) or name in _MAYBE_IN_PLACE or target == COPY_IN
    if not outputs or writes or name.startswith(("_foreach_", "_fused_")):
        return False
    given = {t.untyped_storage()._cdata for t in inputs if t.layout is torch.strided}
    return all(t.layout is torch.strided and t.untyped_storage()._cdata in given for t in outputs)


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _in_memory(tensor: Tensor) -> int:
    """Elements that a tensor has memory for: dimensions of stride 0 are expanded."""
    if tensor.layout is not torch.strided:
        return tensor.numel()
    return prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step != 0 or size == 0)


def _sizes(tensors: Iterable[Tensor]) -> float:
    return sum(_in_memory(t) * t.element_size() for t in tensors)


def _sent(name: str, argument: Argument, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Bytes that a rank sends, and receives, in a collective: all but its own share, twice what is reduced for all."""
    ranks = ranks_of(argument)
    whole = max(_sizes(outputs), *(_sizes([t]) for t in inputs))
    return whole * (ranks - 1) / ranks * (2 if name.startswith(("all_reduce", "allreduce")) else 1)


def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    written = _sizes(outputs)
    if name in _WRITES_ONLY:
        return written
    if name in _LOOKUPS:
        return 2 * written + _sizes(t for t in inputs if not _floating(t))
    if name.startswith("_foreach_"):  # one that is in two of the lists (a squared gradient's) is read once
        inputs = list({(t.untyped_storage()._cdata, t.storage_offset()): t for t in inputs}.values())
    return written + _sizes(inputs)


def _written_into(operator: Operator, argument: Argument) -> float:
    """Bytes written into arguments that are not returned, as the ops of optimizers over all parameters do."""
    # fused optimizers write to gradients only to unscale them
    read_only = () if argument("grad_scale") is not None else ("grads",)
    return _sizes(leaves([argument(name) for name in operator.written if name not in read_only], Tensor))


def _elements(inputs: list[Tensor], outputs: list[Tensor]) -> int:
    return max([*(t.numel() for t in outputs), *map(_in_memory, inputs)], default=0)


def _all_contiguous(tensors: list[Tensor]) -> bool:
    """Whether memory is walked in one order on both sides; the innermost dimension decides."""
    return len({_order(t.shape, t.stride()) for t in tensors if t.layout is torch.strided}) <= 1


def _order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions by their stride, those of one element left out."""
    wide = [i for i in range(len(shape)) if shape[i] > 1]
    return tuple(sorted(wide, key=lambda i: (-stride[i], i)))


def _smallest(inputs: list[Tensor]) -> int:
    """The least of m, n and k: all dimensions of the two last matrices but those of the batch."""
    matrices = [t.shape[-2:] for t in inputs if t.dim() >= 2][-2:]
    return min((size for shape in matrices for size in shape), default=1)


def _four_bits(argument: Argument, inputs: list[Tensor], outputs: list[Tensor], flops: int) -> Work:
    """bitsandbytes' product: packed weight and tables become a whole one in memory, which is then multiplied."""
    x, shape = inputs[0], argument("shapeB")
    whole = prod(shape) * x.element_size()
    unpacked = whole + _sizes(inputs[1:])
    moved = unpacked + _sizes([x]) + whole + _sizes(outputs)
    smallest = min(prod(x.shape[:-1]), *shape)
    return Work("matrix", "gemm_4bit", dtype_name(x.dtype), flops, moved, _elements([x], outputs), smallest, unpacked)


def _smallest_of_convolution(inputs: list[Tensor]) -> int:
    """As of the product that a convolution is: output channels, or input channels times the window."""
    weight = [t.shape for t in inputs if t.dim() >= 3][-1:] or [(1, 1, 1)]  # forward and backward name it last
    return max(1, min(weight[0][0], prod(weight[0][1:])))


def _attention(name: str, argument: Argument, outputs: list[Tensor], flops: int) -> Work:
    """Fused attention, forward or backward: FLOPs of the products, bytes of queries, keys, values and results.

    Kernels skip the blocks above the diagonal of a causal mask, which torch's FLOP formulas count.
    """
    query, key, value = (argument(tensor) for tensor in ("query", "key", "value"))
    causal = argument("is_causal") and query.shape[-2] == key.shape[-2]
    # two products forward; five backward, one of which recomputes the scores
    inner, outer = query.shape[-1], value.shape[-1]
    each = inner + outer if name == ATTENTION else 3 * inner + 2 * outer
    done = (flops or 2 * prod(query.shape[:-1]) * key.shape[-2] * each) * (0.5 if causal else 1.0)
    moved = _sizes([*outputs, query, key, value])
    if name != ATTENTION:  # and the result, with its gradient
        moved += 2 * _sizes([query])
    dtype = dtype_name(query.dtype)
    return Work("attention", name, dtype, done, moved, query.numel(), query.shape[-1])
