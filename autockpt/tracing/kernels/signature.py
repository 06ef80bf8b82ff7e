"""The text signature of an op call: what its time depends on, and nothing that differs between two equal calls.

``aten.mm.default(bfloat16[8192,4096], bfloat16[4096,4096]{1,4096})``: dtypes, shapes in elements, strides where the
tensor is not contiguous, and arguments that are no tensors. Left out are storages, values, devices and generators; a
float is written as ``float`` unless it decides the work (an exponent, a probability), since learning rates and bias
corrections change from step to step. Attention kernels are called ``attention`` and ``attention_backward`` whichever
kernel a device chooses. An addition or scatter is the same in place and out of place: which of the two PyTorch takes
depends on whether a dispatch mode, such as a timer, is looking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from autockpt.tracing.kernels.operators import IN_PLACE, Argument

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


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


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


def _ranks(group: Any) -> int:
    import torch._C._distributed_c10d as c10d  # private: ops are called with what these tell the groups of

    find: Any = c10d._resolve_process_group if isinstance(group, str) else c10d.ProcessGroup.unbox
    return find(group).size()


def ranks_of(argument: Argument) -> int:
    """How many ranks run a collective; two where it does not name its group."""
    return next((_ranks(group) for group in map(argument, _GROUPS) if group is not None), 2)


def _text(value: Any, name: str) -> str:
    if name in _GROUPS:
        return f"{RANKS}{_ranks(value)}"
    if isinstance(value, Tensor):
        return _tensor_text(value)
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


def _tensor_text(tensor: Tensor) -> str:
    sizes = f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return sizes if stride == contiguous_stride(tensor.shape) else f"{sizes}{{{','.join(map(str, stride))}}}"


def _runs(items: list[str]) -> Iterator[str]:
    """Equal neighbours written once with their count: ``float32[8]*3``."""
    for item, group in groupby(items):
        count = len(list(group))
        yield item if count == 1 else f"{item}*{count}"
