"""``autockpt.trace``: the graph of a live model's training step, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autockpt.errors import python_door
from autockpt.schema.choices import Choice
from autockpt.schema.graph import Graph
from autockpt.schema.plan import Plan
from autockpt.tracing.tracer import Tracer
from autockpt.workload import Step


@python_door
def trace(step: Step, plan: Plan | Mapping[str, Choice] | str | Path | None = None) -> Graph:
    """Trace one whole training step of a live model, with a plan (or choices by unit name) attached or without.

    The model, its optimizer and its gradients stay as they are; nothing is computed and no memory is taken for the
    step: it is ghost-run where that is possible, else recorded from a real step, and the graph says so. Raises
    PlanError for a plan that does not fit the model, WorkloadError where the step fails, GhostError where a model on an
    accelerator cannot be traced without real steps.
    """
    with Tracer.from_step(step) as tracer:
        if isinstance(plan, (str, Path)):
            plan = Plan.load(plan)
        if isinstance(plan, Plan):
            plan = plan.choices_for(tracer.units, tracer.head)
        return tracer.trace(plan)
