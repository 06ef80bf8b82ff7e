"""What an op would return: sizes, strides and dtypes without running its kernel, by fake tensors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autockpt.tracing.layouts import Layout, correct, replace
from autockpt.tracing.operators import Operator, count_flops, flat_tensors


@dataclass(frozen=True)
class Outcome:
    """An op's result as a tree of Layout (constants as they are), its FLOPs, and why there is none (``problem``)."""

    tree: Any = None
    flops: int = 0
    problem: str | None = None


class Shapes:
    """Shape inference; one instance keeps one fake tensor mode."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def infer(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """The outcome of a call. Never raises: what could not be inferred is said in ``problem``."""

        def argument(name: str) -> Any:
            return operator.argument(name, args, kwargs)

        rule = replace(operator.base)
        if rule is not None:
            tree = rule(argument)
            return Outcome(tree, count_flops(operator, args, kwargs, _meta(tree)))
        try:
            with _quiet(), self._mode:
                result = func(*_fake(args), **_fake(kwargs))
            tree = _layouts(result)
        except Exception as error:  # a kept exception would keep the tensors of its frames alive
            lines = str(error).splitlines() or [""]
            return Outcome(problem=f"{type(error).__name__}: {lines[0]}"[:200])
        tensors = flat_tensors([*args, *kwargs.values()])
        tree = correct(operator.base, tree, argument, tensors)
        return Outcome(tree, count_flops(operator, args, kwargs, result))


def leaves(tree: Any) -> list[Layout]:
    """The layouts in a result tree."""
    if isinstance(tree, Layout):
        return [tree]
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, (list, tuple)) else []


def _fake(value: Any) -> Any:
    """A copy of nested arguments with fake tensors in place of tensors; a fake mode must be active."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _fake(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_fake(item) for item in value)
    return value


def _layouts(value: Any) -> Any:
    if isinstance(value, Tensor):
        nbytes = value.untyped_storage().nbytes()
        return Layout(tuple(value.size()), tuple(value.stride()), value.dtype, int(nbytes))
    if isinstance(value, (list, tuple)):
        return type(value)(_layouts(item) for item in value)
    return value


def _meta(tree: Any) -> Any:
    """Tensors without memory of the given layouts."""
    if isinstance(tree, Layout):
        return torch.empty_strided(tree.size, tree.stride, dtype=tree.dtype, device="meta")
    return type(tree)(_meta(item) for item in tree) if isinstance(tree, (list, tuple)) else tree


class _quiet:
    """Fake tensors log a traceback for every failure before they raise it.

    Not by the logger's level: each change of one empties the caches of all loggers there are.
    """

    _logger = logging.getLogger("torch._subclasses.fake_tensor")

    def __enter__(self) -> None:
        self._disabled, self._logger.disabled = self._logger.disabled, True

    def __exit__(self, *_: object) -> None:
        self._logger.disabled = self._disabled
