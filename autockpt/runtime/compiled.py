"""How a live model's steps are compiled."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from autockpt.schema.names import ancestors
from autockpt.schema.plan import CompileMode
from autockpt.workload.units import named_units


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
