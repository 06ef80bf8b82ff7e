"""How a live model's steps are compiled, and what to say where a plan was made for others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from autockpt.schema.names import ancestors
from autockpt.schema.plan import CompileMode, Plan, Steps
from autockpt.schema.sizes import format_bytes
from autockpt.workload.names import named_units

STEPS: dict[Steps, str] = {
    "layers": "steps in which every layer is compiled",
    "model": "steps in which the whole model is compiled",
    "eager": "eager steps",
}
"""Steps by how they are compiled, in words."""
_FOUND: dict[Steps, str] = {
    "layers": "this model's layers are compiled",
    "model": "this model is compiled as a whole",
    "eager": "this model runs eagerly",
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
    steps = found or "eager"
    text = (
        f"the plan was made for {STEPS[plan.steps]}, and {_FOUND[steps]}: its promise about memory and time does not "
        "hold"
    )
    if plan.measured is not None and (here := plan.otherwise.get(steps)) is not None:
        return (
            f"{text}. Its choices were measured in {STEPS[steps]}, too: {format_bytes(here.peak_bytes)} and "
            f"{here.step_seconds:.3g} s a step instead of {format_bytes(plan.measured.peak_bytes)} and "
            f"{plan.measured.step_seconds:.3g} s"
        )
    search = f"autockpt search --compile {found}" if found else "autockpt search"
    differs = "by how much it differs was not measured"
    if plan.measured is not None:
        differs += f" (`autockpt verify {plan.file} --compile {steps}` does)"
    return f"{text}; {differs}. `{search}` finds a plan for these steps"
