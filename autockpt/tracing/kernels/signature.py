"""The text signature of an op call: what its time depends on, and nothing that differs between two equal calls.

``aten.mm.default(bf16[8192,4096], bf16[4096,4096]{1,4096})``: dtypes, shapes in elements, strides where the tensor is
not contiguous, and arguments that are no tensors. Left out are storages, values, devices and generators; a float is
written as ``float`` unless it decides the work (an exponent, a probability), since learning rates and bias corrections
change from step to step. Attention kernels are called ``attention`` and ``attention_backward`` whichever kernel a
device chooses. An addition or scatter is the same in place and out of place: which of the two PyTorch takes depends on
whether a dispatch mode, such as a timer, is looking.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autockpt.tracing.kernels.operators import IN_PLACE, leaves

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
# Floats that change how much a kernel does.
_TELLING = frozenset({"exponent", "p", "ord", "dropout_p", "dropout"})
_GROUPS = frozenset({"process_group", "group_name"})
RANKS = "ranks"
"""How a process group stands in a signature, with its size: ``ranks8``."""
_IGNORED = frozenset({"device", "layout", "pin_memory", "generator", "non_blocking"})
_ATTENTION = re.compile(
    r"aten\._scaled_dot_product_(?:flash_attention_for_cpu|flash_attention|efficient_attention|cudnn_attention"
    r"|fused_attention_overrideable)(_backward)?\."
)
ATTENTION = "attention"
_SAME_AS = {in_place: name for name, in_place in IN_PLACE.items()}


class TensorSpec(NamedTuple):
    """A tensor in a signature: ``dtype`` as in the text, sizes and strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        sizes = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.stride == contiguous_stride(self.shape):
            return sizes
        return f"{sizes}{{{','.join(map(str, self.stride))}}}"


class Word(str):
    """A value that stands in a signature by name only: ``float``, a dtype, a memory format."""


@dataclass
class Call:
    """A parsed signature. Leaves are TensorSpec, Word, numbers, bool, str and None, in lists as in the call."""

    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[TensorSpec]:
        """The tensors that the call takes, in order, those in lists included."""
        yield from leaves([*self.args, *self.kwargs.values()], TensorSpec)


def signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """The signature of calling the overload ``func``: equal for a ghost run and for a real step on any device."""
    attention = _ATTENTION.match(str(func))
    if attention:
        return _attention(func, args, kwargs or {}, attention[1] or "")
    target = _SAME_AS.get(str(func), func)
    names = [argument.name for argument in func._schema.arguments]
    parts = [_text(value, names[i] if i < len(names) else "") for i, value in enumerate(args)]
    parts += [f"{k}={_text(v, k)}" for k, v in (kwargs or {}).items() if k not in _IGNORED]
    return f"{target}({', '.join(parts)})"


def parse_signature(text: str) -> Call:
    """The parts of a signature: a call as Python has it, but for its tensors. Raises ValueError for other text."""
    target, _, rest = text.partition("(")
    try:
        found = ast.parse(f"op({_TENSOR.sub(_as_call, rest)}", mode="eval").body
        if not isinstance(found, ast.Call):
            raise SyntaxError
        return Call(target, list(map(_value, found.args)), {str(k.arg): _value(k.value) for k in found.keywords})
    except (SyntaxError, ValueError, TypeError):
        raise ValueError(f"not an op signature: {text!r}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``bf16``; torch's own name for the rare ones."""
    return _DTYPES.get(dtype) or str(dtype)[6:]


def dtype_of(name: str) -> torch.dtype:
    """The dtype behind a short name. Raises ValueError for an unknown one."""
    dtype = _NAMED.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], suffix: str) -> str:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask") if "attn_mask" in names else given.get("attn_bias")
    qkv = ", ".join(_text(given[name], name) for name in ("query", "key", "value"))
    masked = mask is not None and mask.numel() > 0  # backward kernels take an empty tensor for no mask
    causal, dropout = bool(given.get("is_causal", False)), float(given.get("dropout_p", 0.0))
    return f"{ATTENTION}{suffix}({qkv}, mask={masked}, causal={causal}, dropout={dropout})"


def _ranks(group: Any) -> str:
    import torch._C._distributed_c10d as c10d  # private: ops are called with what these tell the groups of

    find: Any = c10d._resolve_process_group if isinstance(group, str) else c10d.ProcessGroup.unbox
    return f"{RANKS}{find(group).size()}"


def _text(value: Any, name: str) -> str:
    if name in _GROUPS:
        return _ranks(value)
    if isinstance(value, Tensor):
        stride = value.stride() if value.layout is torch.strided else ()
        return str(TensorSpec(dtype_name(value.dtype), tuple(value.shape), tuple(stride)))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_runs([_text(item, name) for item in value]))}]"
    if isinstance(value, float):
        return repr(value) if name in _TELLING else "float"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.memory_format):
        return str(value)[6:]
    return "_" if isinstance(value, (torch.device, torch.layout, torch.Generator)) else type(value).__name__


def _runs(items: list[str]) -> Iterator[str]:
    """Equal neighbours written once with their count: ``f32[8]*3``."""
    for item, group in groupby(items):
        count = len(list(group))
        yield item if count == 1 else f"{item}*{count}"


_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TENSOR = re.compile(rf"{_TEXT}|\b([a-z]\w*)\[([\d,]*)\](?:{{([\d,]*)}})?")


def _as_call(found: re.Match[str]) -> str:
    """``bf16[8,4]{4,1}`` in Python: ``bf16([8,4], [4,1])``; text in quotes as it is."""
    dtype, shape, stride = found.groups()
    if dtype is None:
        return found[0]
    return f"{dtype}([{shape}])" if stride is None else f"{dtype}([{shape}], [{stride}])"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=dtype), args=[shape, *stride]):
            sizes = tuple(_value(shape))
            return TensorSpec(dtype, sizes, tuple(_value(stride[0])) if stride else contiguous_stride(sizes))
        case ast.List(elts=items):
            return [value for item in items for value in _repeated(item)]
        case ast.UnaryOp(operand=positive):
            return -_value(positive)
        case ast.Name(id="inf" | "nan" as number):
            return float(number)
        case ast.Name(id=word):
            return Word(word)
    return ast.literal_eval(node)


def _repeated(item: ast.expr) -> list[Any]:
    if isinstance(item, ast.BinOp):
        return [_value(item.left)] * _value(item.right)
    return [_value(item)]
