"""What an op asks of a device, read off its signature: FLOPs, bytes moved, elements, and the kind of its kernel.

Bytes are those that a good kernel must move: every tensor once, a tensor that is expanded only where it has memory, a
lookup the rows it takes and not the table, fused attention no matrix of scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal

from autockpt.cost.step import UNTOUCHED, base_name, is_view
from autockpt.schema.graph import Op
from autockpt.tracing.kernels.operators import COLLECTIVES, COPY_IN, Operator, leaves, overload_of
from autockpt.tracing.kernels.signature import ATTENTION, RANKS, Call, TensorSpec, Word, dtype_of, parse_signature
from autockpt.tracing.kernels.timeline import element_bytes

WorkKind = Literal["none", "matrix", "attention", "elements", "link"]

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


@dataclass(frozen=True)
class Work:
    """FLOPs (multiply and add are two), bytes read and written, elements of the largest tensor.

    ``name`` is the op without namespace and overload (``tanh``), ``dtype`` that of the arithmetic as torch names it
    (``bfloat16``), ``smallest`` the smallest dimension of a product. ``unpacked``: those of the bytes that are moved
    before the product begins, to dequantise its weight. Of a collective (``link``) ``bytes`` are what a rank sends.
    """

    kind: WorkKind
    name: str
    dtype: str = "float32"
    flops: float = 0.0
    bytes: float = 0.0
    elements: int = 0
    smallest: int = 0
    unpacked: float = 0.0


def work_of_op(op: Op, signature: str) -> Work:
    """The work of one recorded op. ``signature`` is the text that ``op.signature`` stands for."""
    call = _parsed(signature)
    name = base_name(call.target)
    inputs = list(call.tensors())
    if name in UNTOUCHED or is_view(op):
        return Work("none", name)
    if op.target.startswith(COLLECTIVES):
        return Work("link", name, bytes=_sent(op, name, call, inputs))
    if op.target == COPY_IN:
        return Work("elements", name, bytes=2 * sum(map(_size, inputs[:-1])))  # the last is the buffer of all ranks
    if name.startswith(ATTENTION):
        return _attention(op, name, call, inputs)
    if name == "gemm_4bit":
        return _four_bits(op, call, inputs)
    dtype = next((torch_name(t.dtype) for t in inputs if _floating(t.dtype)), "float32")
    moved, elements = _moved(op, name, inputs) + _written_into(call), _elements(op, inputs)
    if op.flops and (name in _PRODUCTS or name in _CONVOLUTIONS):
        smallest = _smallest_of_convolution(inputs) if name in _CONVOLUTIONS else _smallest(inputs)
        return Work("matrix", name, dtype, float(op.flops), moved, elements, smallest)
    if name in _COPIES and not _all_contiguous(op, inputs):
        name = STRIDED_COPY
    return Work("elements", name, dtype, float(op.flops), moved, elements)


@cache
def torch_name(short: str) -> str:
    """``bf16`` → ``bfloat16``."""
    try:
        return str(dtype_of(short)).removeprefix("torch.")
    except ValueError:
        return short


_parsed = cache(parse_signature)


def _floating(short: str) -> bool:
    return torch_name(short).startswith(("float", "bfloat", "complex"))


def _in_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements that a tensor has memory for: dimensions of stride 0 are expanded."""
    if len(shape) != len(stride):
        return prod(shape)
    return prod(size for size, step in zip(shape, stride, strict=True) if step != 0 or size == 0)


def _size(tensor: TensorSpec) -> float:
    return _in_memory(tensor.shape, tensor.stride) * element_bytes(torch_name(tensor.dtype))


def _written(op: Op) -> float:
    return sum(_in_memory(t.shape, t.stride) * element_bytes(t.dtype) for t in op.outputs)


def _sent(op: Op, name: str, call: Call, inputs: list[TensorSpec]) -> float:
    """Bytes that a rank sends, and receives, in a collective: all but its own share, twice what is reduced for all."""
    words = leaves([*call.args, *call.kwargs.values()], Word)
    ranks = next((int(text.removeprefix(RANKS)) for text in words if text.startswith(RANKS)), 2)
    whole = max(_written(op), *map(_size, inputs))
    return whole * (ranks - 1) / ranks * (2 if name.startswith(("all_reduce", "allreduce")) else 1)


def _moved(op: Op, name: str, inputs: list[TensorSpec]) -> float:
    written = _written(op)
    if name in _WRITES_ONLY:
        return written
    if name in _LOOKUPS:
        indices = sum(_size(t) for t in inputs if not _floating(t.dtype))
        return 2 * written + indices
    return written + sum(_size(t) for t in _read(op, name, inputs))


def _read(op: Op, name: str, inputs: list[TensorSpec]) -> Iterable[TensorSpec]:
    """The tensors that are read. An op over lists reads one that is in two of them (a squared gradient's) once."""
    if not name.startswith("_foreach_") or len(op.inputs) != len(inputs):
        return inputs
    offsets = op.offsets or (0,) * len(inputs)
    return dict(zip(zip(op.inputs, offsets, strict=True), inputs, strict=True)).values()


def _written_into(call: Call) -> float:
    """Bytes written into arguments that are not returned, as the ops of optimizers over all parameters do."""
    if (operator := _operator(call.target)) is None:
        return 0.0
    # fused optimizers write to gradients only to unscale them
    read_only = () if call.kwargs.get("grad_scale") is not None else ("grads",)
    names = (name for name in operator.written if name not in read_only)
    written = [operator.argument(name, tuple(call.args), call.kwargs) for name in names]
    return sum(_size(t) for t in leaves(written, TensorSpec))


@cache
def _operator(target: str) -> Operator | None:
    """None for an op of a library that is not imported here."""
    try:
        return Operator(overload_of(target))
    except (AttributeError, ValueError):
        return None


def _elements(op: Op, inputs: list[TensorSpec]) -> int:
    sizes = [prod(t.shape) for t in op.outputs]
    return max([*sizes, *(_in_memory(t.shape, t.stride) for t in inputs)], default=0)


def _all_contiguous(op: Op, inputs: list[TensorSpec]) -> bool:
    """Whether memory is walked in one order on both sides; the innermost dimension decides."""
    tensors = [(t.shape, t.stride) for t in inputs] + [(t.shape, t.stride) for t in op.outputs]
    return len({_order(shape, stride) for shape, stride in tensors if len(shape) == len(stride)}) <= 1


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions by their stride, those of one element left out."""
    wide = [i for i in range(len(shape)) if shape[i] > 1]
    return tuple(sorted(wide, key=lambda i: (-stride[i], i)))


def _smallest(inputs: list[TensorSpec]) -> int:
    """The least of m, n and k: all dimensions of the two last matrices but those of the batch."""
    matrices = [t.shape[-2:] for t in inputs if len(t.shape) >= 2][-2:]
    return min((size for shape in matrices for size in shape), default=1)


def _four_bits(op: Op, call: Call, inputs: list[TensorSpec]) -> Work:
    """bitsandbytes' product: packed weight and tables become a whole one in memory, which is then multiplied."""
    x, shape = inputs[0], [int(size) for size in call.args[2]]
    dtype = torch_name(x.dtype)
    whole = prod(shape) * element_bytes(dtype)
    unpacked = whole + sum(_size(t) for t in inputs[1:])
    moved = unpacked + _size(x) + whole + _written(op)
    smallest = min(prod(x.shape[:-1]), *shape)
    return Work("matrix", "gemm_4bit", dtype, float(op.flops), moved, _elements(op, [x]), smallest, unpacked)


def _smallest_of_convolution(inputs: list[TensorSpec]) -> int:
    """As of the product that a convolution is: output channels, or input channels times the window."""
    weight = [t.shape for t in inputs if len(t.shape) >= 3][-1:] or [(1, 1, 1)]  # forward and backward name it last
    return max(1, min(weight[0][0], prod(weight[0][1:])))


def _attention(op: Op, name: str, call: Call, inputs: list[TensorSpec]) -> Work:
    """Fused attention, forward or backward: FLOPs of the products, bytes of queries, keys, values and results.

    Kernels skip the blocks above the diagonal of a causal mask, which torch's FLOP formulas count.
    """
    query, key = inputs[0], inputs[1]
    causal = call.kwargs.get("causal") is True and query.shape[-2] == key.shape[-2]
    # two products forward; five backward, one of which recomputes the scores
    inner, outer = query.shape[-1], inputs[2].shape[-1]
    each = inner + outer if name == ATTENTION else 3 * inner + 2 * outer
    flops = op.flops or 2.0 * prod(query.shape[:-1]) * key.shape[-2] * each
    moved = _written(op) + sum(_size(t) for t in inputs)
    if name != ATTENTION:  # the gradient of the result and the result itself are not in the signature
        moved += 2 * _size(query)
    dtype = torch_name(query.dtype)
    return Work("attention", name, dtype, flops * (0.5 if causal else 1.0), moved, prod(query.shape), query.shape[-1])
