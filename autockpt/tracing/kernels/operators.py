"""Facts about operators that the recorder needs, read from their schemas once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Argument = Callable[[str], Any]
"""A call's argument by its name in the schema; None where it was not given."""

# Change a tensor's sizes or storage without touching its bytes: safe to run on a ghost.
_LAYOUT_ONLY = frozenset(
    f"{name}_"
    for name in "resize resize_as set as_strided detach t transpose swapdims swapaxes squeeze unsqueeze".split()  # noqa: SIM905
)
# Return a view although their schema does not say so.
_HIDDEN_VIEWS = frozenset(
    ("_unsafe_view", "_reshape_alias", "lift_fresh", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
)
# Answer with positions: on a ghost they are answered as if every position were chosen equally often.
_ROUTING = frozenset(
    ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "mode", "multinomial")
)

# Tagged as elementwise, but convert from one type to another without a temporary.
_COPIES = frozenset(("_to_copy", "clone", "copy", "copy_", "fill", "fill_"))

# What PyTorch runs in the memory of the first argument or not, depending on whether a dispatch mode is looking:
# additions of gradients, and the backward of a selection, into the zeros that were just made.
IN_PLACE = {
    "aten.add.Tensor": "aten.add_.Tensor",
    "aten.scatter.src": "aten.scatter_.src",
    "aten.scatter_add.default": "aten.scatter_add_.default",
    "aten.index_add.default": "aten.index_add_.default",
    "aten.index_put.default": "aten.index_put_.default",
}
"""Overloads that a plain step may run in place, by name, with the name of the overload that does."""


COLLECTIVES = ("c10d.", "_c10d_functional")
"""How the names of ops begin that ranks run together."""
WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # of these ops such as wait for another's end, now or later
COPY_IN, COPY_OUT = "fsdp.all_gather_copy_in.default", "fsdp.split_with_sizes_copy.default"


class Operator:
    """Facts about one overload.

    ``of_ranks``: a collective, or what FSDP2 fills the buffer of one with.
    ``view``: returns views of its inputs. ``layout_only``: mutates metadata only. ``mutates``: writes to an input.
    ``returned``: for each return value the name of the argument that it is, or None for a new tensor.
    ``written``: names of the arguments that it writes to and does not return.
    ``pointwise``: runs on torch's elementwise iterator.
    ``in_place``: the overload of ``IN_PLACE`` that a plain step may run instead, or None.
    ``flops``: torch's formula for floating point operations, or None.
    ``calls``: what the recorder knows of its calls, by all that they depend on.
    """

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        self.name = str(func)
        self.namespace, self.base = schema.name.split("::")
        self.positions = {argument.name: i for i, argument in enumerate(schema.arguments)}
        writes: list[Any] = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.mutates = bool(writes)
        written = {label: a.name for a in writes for label in a.alias_info.before_set}
        self.returns = len(schema.returns)
        aliased = [r.alias_info for r in schema.returns]
        self.returned = [_argument_of(alias, written) for alias in aliased]
        self.written = [a.name for a in writes if a.name not in self.returned]
        self.layout_only = self.base in _LAYOUT_ONLY
        self.view = not writes and (any(a is not None for a in aliased) or self.base in _HIDDEN_VIEWS)
        self.adds = self.name == "aten.add.Tensor"
        self.in_place = overload_of(IN_PLACE[self.name]) if self.name in IN_PLACE else None
        self.pointwise = torch.Tag.pointwise in func.tags and self.base not in _COPIES
        self.multiplies = self.base in ("mm", "bmm", "addmm", "baddbmm")
        self.routing = self.base in _ROUTING
        self.flops = _flop_formula(func)
        self.calls: dict[Any, Any] = {}
        self.of_ranks = self.name.startswith(COLLECTIVES) or self.name == COPY_IN

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
        """The value of a named argument in a call."""
        position = self.positions.get(name)
        if position is not None and position < len(args):
            return args[position]
        return kwargs.get(name, default)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Argument:
        """Those of one call, for rules that ask for some of them."""
        return partial(self.argument, args=args, kwargs=kwargs)


class Operators(dict[Any, Operator]):
    """Operators by overload, filled as they are met."""

    def __missing__(self, func: Any) -> Operator:
        self[func] = operator = Operator(func)
        return operator


def overload_of(name: str) -> Any:
    """``aten.mm.default`` as a callable. Raises AttributeError for an unknown one."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _argument_of(alias: Any, written: dict[str, str]) -> str | None:
    """The argument that a return value is, by its alias annotation."""
    labels = alias.before_set if alias is not None else ()
    return next((written[label] for label in labels if label in written), None)


def _flop_formula(func: torch._ops.OpOverload) -> Any:
    from torch.utils.flop_counter import flop_registry

    packet = func.overloadpacket
    name = packet.__name__
    if "_flash_attention_for_cpu" in name:  # does the arithmetic of the CUDA kernel that torch has a formula for
        packet = getattr(torch.ops.aten, name.replace("_for_cpu", ""))
    return flop_registry.get(packet) or _FORMULAS.get(name)


def _grouped_mm_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    batches = a.size(0) if a.dim() == b.dim() == 3 else 1
    return 2 * batches * a.size(-2) * a.size(-1) * b.size(-1)


_FORMULAS: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_mm_flops,
    "gemm_4bit": lambda x, packed, shape, *_, **__: 2 * x.numel() * int(shape[0]),
    "int8_mixed_scaled_mm": lambda x, codes, weight, *_, **__: 2 * codes.numel() * weight.size(0),
}
"""Of products that torch has no formula for: its own, and bitsandbytes'."""


def count_flops(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating point operations of one call, 0 where torch has no formula for it (or the formula does not apply)."""
    if operator.flops is None:
        return 0
    try:
        return int(operator.flops(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, IndexError, AssertionError, AttributeError, NotImplementedError):
        return 0


def channels_last(x: Tensor) -> torch.memory_format | None:
    """The memory format of images (or volumes) that have their channels last, and not first as well; else None."""
    kind = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return kind if kind is not None and x.is_contiguous(memory_format=kind) and not x.is_contiguous() else None


def leaves(value: Any, kind: type[T]) -> list[T]:
    """All that is of a kind in an op's arguments or result: the value itself, or what lists and tuples hold of it."""
    if isinstance(value, kind):
        return [value]
    return [leaf for item in value for leaf in leaves(item, kind)] if isinstance(value, (list, tuple)) else []


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in an op's result: a tensor, or lists and tuples of them."""
    return leaves(value, Tensor)
