"""compile_budget: the compiler saves only a share of what it would save by itself of a unit's graph.

PyTorch reads ``torch._functorch.config.activation_memory_budget`` once, when it partitions a graph into forward and
backward. So the number is set while the compiler traces the unit's forward and reset when that compilation ends:
it holds for exactly the graph that the unit is part of, whether the model was compiled before the plan was applied or
afterwards. The fraction is part of what the compiler guards on, so layers with different fractions get different code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner
from autockpt.policies.compiling import claim
from autockpt.schema.choices import CompileBudget


class BudgetState(Attachment):
    """``fraction`` as text: the compiler would take a number that differs between layers for an input."""

    def __init__(self, unit: str, fraction: float) -> None:
        super().__init__(unit)
        self.fraction = repr(fraction)


def attach_compile_budget(unit: PlannedUnit, session: Session) -> None:
    assert isinstance(unit.choice, CompileBudget)
    session.place(unit.module, run_budgeted, BudgetState(unit.name, unit.choice.fraction))


def run_budgeted(module: nn.Module, state: BudgetState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward, under its budget where a compiler takes it into a graph; else as it is, which is said once.

    Compiling raises ConflictError (wrapped by the compiler) where the graph draws random numbers, and where another
    unit of the same graph asked for another fraction.
    """
    if state.active and torch.is_grad_enabled():
        if torch.compiler.is_dynamo_compiling():
            claim(state.fraction)  # not the unit: the compiler would guard on its name, and compile equal layers again
        else:
            state.warn_once(  # of all units in the same words, which Python shows once
                "layers with a choice compile_budget do not run compiled: they save everything. Compile them (for "
                "layer in …: layer.compile()) or the whole model."
            )
    return call_inner(module, state, args, kwargs)
