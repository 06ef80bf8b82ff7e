"""How a live model's steps are compiled, and what to say where a plan was made for others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from autockpt.schema.names import ancestors
from autockpt.schema.plan import CompileMode, Plan
from autockpt.workload.names import named_units

_MADE_FOR: dict[CompileMode | None, str] = {
    "layers": "steps in which every layer is compiled",
    "model": "steps in which the whole model is compiled",
    None: "eager steps",
}
_FOUND: dict[CompileMode | None, str] = {
    "layers": "this model's layers are compiled",
    "model": "this model is compiled as a whole",
    None: "this model runs eagerly",
}


def compiled_as(model: nn.Module, blocks: Iterable[str]) -> CompileMode | None:
    """How a live model's steps are compiled, as far as its modules show: ``blocks`` are the names of its layers.

    ``layers`` where one of these is, by ``layer.compile()`` or ``torch.compile(layer)``; ``model`` where a module
    around them is; None for neither. What compiles a function around the whole step is not seen from here.
    """
    compiled = {
        name
        for name, module in named_units(model)
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    }
    blocks = tuple(blocks)
    if not compiled.isdisjoint(blocks):
        return "layers"
    around = {"", *(outer for name in blocks for outer in ancestors(name))}
    return None if compiled.isdisjoint(around) else "model"


def other_steps(plan: Plan) -> dict[CompileMode | None, str]:
    """What to say to a plan that promises something, by how the steps that it meets are compiled."""
    modes: tuple[CompileMode | None, ...] = (None, "layers", "model")
    return {} if plan.status == "unmeasured" else {mode: _other(plan, mode) for mode in modes if mode != plan.compile}


def _other(plan: Plan, found: CompileMode | None) -> str:
    search = f"autockpt search --compile {found}" if found else "autockpt search"
    return (
        f"the plan was made for {_MADE_FOR[plan.compile]}, and {_FOUND[found]}: its promise about memory and time does "
        f"not hold. `{search}` finds a plan for these steps"
    )
