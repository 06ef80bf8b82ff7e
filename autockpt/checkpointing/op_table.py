"""What is known of single ops, from their schemas and names: which are expensive, which write, which can run again."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

Overload: Any = type(torch.ops.aten.add.Tensor)  # of all ops but torch.cond and the like


@functools.cache
def is_heavy(func: Any) -> bool:
    """Whether an op's cost lies in arithmetic: those whose floating-point operations PyTorch counts, attentions, and
    bitsandbytes' products with quantised weights."""
    if getattr(func, "overloadpacket", None) in flop_registry or is_attention(func):
        return True
    return str(func).startswith(("bitsandbytes.gemm_4bit", "bitsandbytes.int8_mixed_scaled_mm"))


@functools.cache
def is_attention(func: Any) -> bool:
    """Whether an op is a fused attention's forward or backward, PyTorch's own or a library's."""
    name = str(func)
    return "scaled_dot_product" in name or "flash_attn" in name or "_attention_forward" in name


def draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call uses dropout. Left out when its forward runs again, it would shift all later random numbers."""
    position, default = dropout_of(func) or (len(args), 0.0)
    return bool(kwargs.get("dropout_p", args[position] if position < len(args) else default))


def dropout_of(func: Any) -> tuple[int, Any] | None:
    """Where a function or an op takes its dropout, and what it is by itself; None where it is not known to take any."""
    # a ghost run puts a function of its own there, which must not be kept
    return (4, 0.0) if func is torch.nn.functional.scaled_dot_product_attention else _dropout_in_schema(func)


@functools.cache  # asking a schema takes as long as running a small op
def _dropout_in_schema(func: Any) -> tuple[int, Any] | None:
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            return position, argument.default_value
    return None


@functools.cache
def written_by(func: Any, unseen: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """What an op writes to, by position and name; ``unseen``: names of what it does so without its schema saying it."""
    arguments, all_of = enumerate(func._schema.arguments), is_collective(func)
    written = ((at, a) for at, a in arguments if all_of or a.name in unseen or (a.alias_info and a.alias_info.is_write))
    return [(at, a.name) for at, a in written]


@functools.cache
def is_collective(func: Any) -> bool:
    """Whether an op is one of torch.distributed's that work in place, of which no schema and no version counter
    tells."""
    return getattr(func, "namespace", "") == "c10d"


Kind = Literal["view", "writes", "writes again", "dynamic", "blank", "again", "heavy", "other"]

# Besides what PyTorch tags as pointwise: ops that give the same bits twice on every device and touch nothing but their
# result. An op with a sum over colliding indices (index_add, cumsum, scatter_add) is not among them: on a GPU the order
# of its additions changes from run to run.
_REPLAYABLE_NAMES = """
    _fused_rms_norm _log_softmax _safe_softmax _softmax _to_copy addcdiv addcmul all amax amin any arange argmax
    argmin cat clone constant_pad_nd copy embedding expand_copy eye flip full full_like gather glu index index_select
    linalg_vector_norm logsumexp masked_fill mean native_group_norm native_layer_norm new_full new_ones new_zeros ones
    ones_like repeat roll scalar_tensor select_scatter slice_scatter stack std std_mean sum tril triu var var_mean
    zeros zeros_like
"""
_REPLAYABLE = frozenset(_REPLAYABLE_NAMES.split())
_DYNAMIC_NAMES = """
    _local_scalar_dense equal is_nonzero masked_select nonzero unique_consecutive unique_dim _unique _unique2
"""
# Their results, or the sizes of these, are numbers that Python code may depend on: no argument of a later op shows it.
_DYNAMIC = frozenset(_DYNAMIC_NAMES.split())
# Their result is there to be written to. What stays unwritten has no meaning.
_BLANK = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# Products without an entry in PyTorch's table of floating-point operations.
_PRODUCTS = frozenset(("_grouped_mm", "dot", "mv"))
# BatchNorm's kernels change them, and neither their schemas nor version counters show it.
STATISTICS = ("running_mean", "running_var")


@functools.cache
def kind_of(func: Any) -> Kind:
    """What a recorder does with an op.

    ``view``: it makes no memory. ``writes``: it changes what it is given. ``writes again``: it changes its first
    argument alone, and in the same way when it runs again on the same. ``dynamic``: what it returns is decided by
    values. ``blank``: memory to be written to. ``again``: it is cheap, and gives the same bits when it runs again.
    ``heavy``: so does this, but it is expensive. ``other``: unknown, as views that autograd does not know for one.
    """
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if schema.is_mutable or is_collective(func) or any(a.name in STATISTICS for a in schema.arguments):
        repeats = func.namespace == "aten" and (name == "copy_" or torch.Tag.pointwise in func.tags)
        in_place = name.endswith("_") and not name.startswith("_") and written_by(func, STATISTICS) == [(0, "self")]
        return "writes again" if repeats and in_place and not _is_seeded(func) else "writes"
    if name in _DYNAMIC:
        return "dynamic"
    if any(r.alias_info is not None for r in schema.returns):
        return "view"
    if is_heavy(func) or name in _PRODUCTS:
        return "heavy"
    if func.namespace != "aten" or _is_seeded(func):
        return "other"
    if name in _BLANK:
        return "blank"
    return "again" if torch.Tag.pointwise in func.tags or name in _REPLAYABLE else "other"


def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
