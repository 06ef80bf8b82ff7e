"""Ops whose results change as soon as a dispatch mode looks on, one that does nothing included: those of the CPU's and
CUDA's backends. ``watched_backends`` asks the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.autocast import autocast_depth
from autockpt.errors import ConflictError
from autockpt.policies.compiling import changes_bits, compile_again, refuse_compiled, run_as_it_is, set_compiler


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(getattr(p, overload) for p in packets if p is not None for overload in p.overloads())


# Of complex numbers: a conjugate that they take inside is not applied (pytorch#198118, open as of torch 2.15).
_OF_COMPLEX = _overloads("linalg_pinv", "linalg_polar", "linalg_matrix_sqrth")
# Under autocast: the matrix products inside of their kernels are cast only where no mode is.
_UNDER_AUTOCAST = _overloads("_sparse_addmm", "_trilinear")
CHANGED_BY_WATCHING = _OF_COMPLEX | _UNDER_AUTOCAST


def passes_by(func: Any) -> bool:
    """Whether an op is ``torch.cond`` or the like, or a compiler traces one of its branches: not to be looked at."""
    return isinstance(func, HigherOrderOperator) or torch.compiler.is_dynamo_compiling()


def count_writes(func: Any, args: tuple[Any, ...]) -> None:
    """An op that writes to tensors has run. Inside a dispatch mode those over lists do not count as changes in place
    (torch 2.13), which autograd and all who look for changes go by."""
    if func._schema.name.startswith("aten::_foreach_"):
        torch.autograd.graph.increment_version([tensor for tensor in args[0] if not tensor.is_inference()])


def refuse_untupled(unit: str, what: str) -> None:
    """Raise ConflictError for ``torch.cond`` or torch's ``map`` of functions that return a tensor, not a tuple.

    Under a dispatch mode torch does not compile these first: backward of the one takes only such as return tuples, and
    the other hands out a tuple of one in a tensor's place.
    """
    raise ConflictError(
        f"watching the ops within {unit} would {what}",
        remedy=f"Let its function return a tuple, or use recompute, selective or save on {unit}.",
    )


def refuse_watching(func: Any, args: tuple[Any, ...], unit: str) -> None:
    """Raise ConflictError where this call of one of ``CHANGED_BY_WATCHING`` would give something else."""
    if func in _OF_COMPLEX and args[0].is_complex():
        what = "of complex numbers give wrong values (pytorch#198118)"
    elif func in _UNDER_AUTOCAST and autocast_depth():  # inside a dispatch mode autocast says that it is off
        what = "under autocast compute with another precision"
    else:
        return
    raise ConflictError(
        f"watching the ops within {unit} would make {func} {what}",
        remedy=f"Use recompute, selective, offload or save on {unit}, or name modules that do not call it in `within`.",
    )


class Watching(TorchDispatchMode):
    """A mode that looks at ops, what ``torch.cond`` and the like return included."""

    supports_higher_order_operators = True

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit
        self._refusal: Callable[[], ConflictError] | None = None  # that held before this was entered

    def __enter__(self) -> Watching:
        self._refusal = refuse_compiled(self._would_be_uncompiled)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        compile_again(self._refusal)
        super().__exit__(*raised)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not wrapped by torch, which costs more than looking at an op

    @partial(run_as_it_is, calls=False)
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compiler = set_compiler(None)  # else it would take on what is called here
        try:
            if compiler and not isinstance(func, HigherOrderOperator) and changes_bits(compiler):
                raise self._would_be_uncompiled()
            return self.look(func, args, kwargs or {})
        finally:
            set_compiler(compiler)

    def look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op; its result."""
        raise NotImplementedError

    def _would_be_uncompiled(self) -> ConflictError:
        return ConflictError(
            f"{self._unit} calls compiled code (torch.compile) whose ops would be watched, and torch then runs it "
            "uncompiled, with other last bits",
            remedy=f"Use recompute, offload or save on {self._unit}, or do not compile what it calls.",
        )
