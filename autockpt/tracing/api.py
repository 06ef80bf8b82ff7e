"""``autockpt.trace``: the graph of a live model's training cycle, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.errors import python_door
from autockpt.schema.choices import Choice
from autockpt.schema.graph import Graph
from autockpt.schema.plan import Plan
from autockpt.tracing.tracer import Tracer
from autockpt.workload import Workload, from_live


@python_door
def trace(
    model: nn.Module,
    batch: Any,
    plan: Plan | Mapping[str, Choice] | str | Path | None = None,
    *,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | str | None = None,
    full_step: Callable[[], Any] | None = None,
    snapshot: tuple[Any, ...] = (),
) -> Graph:
    """Trace one whole training cycle of a live model, with a plan (or choices by unit name) attached or without.

    The model, its optimizer and its gradients stay as they are; nothing is computed and no memory is taken for the
    step. The arguments are those of ``autockpt.search``. Raises PlanError for a plan that does not fit the model,
    WorkloadError where the step fails, GhostError where a model on an accelerator cannot be traced without real steps.
    """
    workload = from_live(
        model,
        batch,
        step=step,
        optimizer=optimizer,
        scaler=scaler,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        autocast=autocast,
        full_step=full_step,
        snapshot=snapshot,
    )
    return trace_workload(workload, plan)


def trace_workload(workload: Workload, plan: Plan | Mapping[str, Choice] | str | Path | None = None) -> Graph:
    """The same for a Workload: ghost-run where that is possible, else recorded from a real step, and said so."""
    with Tracer.from_workload(workload) as tracer:
        if isinstance(plan, (str, Path)):
            plan = Plan.load(plan)
        if isinstance(plan, Plan):
            plan = plan.choices_for(tracer.units, tracer.head)
        return tracer.trace(plan)
