"""torch.compile of the whole model, with the partitioner's ``activation_memory_budget``."""

from __future__ import annotations

import itertools
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from autockpt.bench.peers.base import Always, Context, Detach, Setting
from autockpt.errors import ConflictError
from autockpt.schema.bench import Group
from autockpt.workload.names import unwrap

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)
BACKEND = "inductor"

_number = itertools.count()
# model -> (backend, budget) -> its compiled forward, so that a turn after the first finds it compiled
_compiled: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, float], Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)


class MemoryBudget(Always):
    """The model's forward compiled as one; 1.0 is what ``torch.compile`` does by itself.

    A budget is a share of the bytes that the compiled graph would save, not a peak. Gradients are equal up to rounding.
    """

    name: ClassVar[str] = "torch.compile"
    group: ClassVar[Group] = "compiled"
    exact: ClassVar[bool] = False

    def missing(self, device_kind: str) -> str:
        if device_kind == "cpu" and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
            return "no C++ compiler was found, which torch.compile needs on a CPU"
        return ""

    def settings(self, context: Context) -> Iterable[Setting]:
        for budget in BUDGETS:
            yield Setting(f"{budget:g}", {"budget": budget, "backend": BACKEND})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        from torch._functorch import config

        budget = setting["budget"]
        known = _compiled.setdefault(model, {})
        if (key := (setting["backend"], budget)) not in known:
            known[key] = torch.compile(_own_code(_call), backend=setting["backend"])
        inner = unwrap(model)
        if "forward" in inner.__dict__:
            raise ConflictError("the model has a forward of its own on the instance, which is not compiled here")
        function = known[key]
        # The budget is read while compiling, and the backward is compiled only when it first runs: it holds throughout.
        patched = config.patch(activation_memory_budget=budget)
        patched.__enter__()
        inner.__dict__["forward"] = partial(function, inner)

        def undo() -> None:
            inner.__dict__.pop("forward", None)
            patched.__exit__(None, None, None)

        return undo


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _own_code(function: FunctionType) -> FunctionType:
    """The same function with a code object of its own: compiled code is kept by code object, one per budget here."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_number)}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
