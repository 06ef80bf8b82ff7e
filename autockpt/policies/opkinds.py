"""What a tape does with an op, told from its schema."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from autockpt.policies.compute_ops import is_heavy
from autockpt.policies.watching import CHANGED_BY_WATCHING

Kind = Literal["view", "hidden view", "writes", "statistics", "suspect", "again", "heavy", "other"]

# Beside what PyTorch tags as pointwise: ops that do the same twice on every device and touch nothing but their result.
_NAMES = """
    _fused_rms_norm _log_softmax _softmax _to_copy addcdiv addcmul all amax amin any argmax argmin cat
    constant_pad_nd copy embedding flip gather glu index_select linalg_vector_norm logsumexp masked_fill mean
    native_group_norm native_layer_norm repeat roll select_scatter slice_scatter stack std std_mean sum tril triu
    var var_mean
"""
_REPLAYABLE = frozenset(_NAMES.split())
_HIDDEN_VIEWS = frozenset(("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "_reshape_alias", "lift_fresh"))
# BatchNorm's kernels change them, and neither their schemas nor version counters tell.
STATISTICS = ("running_mean", "running_var")


@functools.cache
def kind_of(func: Any) -> Kind:
    """What a tape does with an op."""
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if schema.is_mutable:
        return "writes"
    if func in CHANGED_BY_WATCHING:
        return "suspect"
    if any(argument.name in STATISTICS for argument in schema.arguments):
        return "statistics"
    if name in _HIDDEN_VIEWS:
        return "hidden view"
    if any(r.alias_info is not None for r in schema.returns):
        return "view"
    if is_heavy(func):
        return "heavy"
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return "other"
    return "again" if torch.Tag.pointwise in func.tags or name in _REPLAYABLE else "other"
