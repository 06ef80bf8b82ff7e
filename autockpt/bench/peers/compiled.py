"""torch.compile of the whole model, with the partitioner's ``activation_memory_budget``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from autockpt.bench.peers.base import Always, Context, Detach, Setting
from autockpt.errors import ConflictError
from autockpt.measuring.compiled import BACKEND, missing, own_code
from autockpt.schema.bench import Group
from autockpt.workload.names import unwrap

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)

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
        return missing(device_kind)

    def settings(self, context: Context) -> Iterable[Setting]:
        for budget in BUDGETS:
            yield Setting(f"{budget:g}", {"budget": budget, "backend": BACKEND})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        from torch._functorch import config

        budget = setting["budget"]
        known = _compiled.setdefault(model, {})
        if (key := (setting["backend"], budget)) not in known:
            known[key] = torch.compile(own_code(_call), backend=setting["backend"])
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
