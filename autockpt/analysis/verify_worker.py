"""The functions of ``verify`` that run in the model's process, by ``Measurer.call``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from autockpt.measuring import StepRunner
from autockpt.measuring.snapshot import Snapshot
from autockpt.runtime import DivergenceCheck, attach
from autockpt.verification import Observation, coarsest, deterministically, kept_state, observe
from autockpt.workload import Step, discover_head
from autockpt.workload.step import DTYPES
from autockpt.workload.units import plan_units


def choices_of(runner: StepRunner, payload: dict[str, Any]) -> dict[str, Any]:
    """The choices of a plan by the names of the runner's model, and the names of all blocks."""
    model, plan = runner.workload.model, payload["plan"]
    units = plan_units(model, plan.settings.get("units"), list(plan.choices))
    blocks = [unit.name for unit in units if unit.role == "block"]
    return {"choices": plan.choices_for(units, discover_head(model)), "blocks": blocks}


def observe_steps(runner: StepRunner, payload: dict[str, Any]) -> Observation:
    """An Observation of two steps: under ``payload["choices"]``, or plainly where that is None."""
    workload, choices, sketched = runner.workload, payload["choices"], payload["sketched"]

    def whole_cycle(between: Any) -> Tensor:
        assert workload.full_step is not None
        workload.full_step()
        return torch.zeros(())

    def observed() -> Observation:
        with runner.session(choices), runner.compiling(choices or {}):
            if workload.full_step is not None:  # a cycle of the user's own, known by the weights that it leaves behind
                with _restored(workload):
                    runner.seed()
                    return observe(workload.model, whole_cycle, sketched=sketched, weights=True)
            if runner.compiler is None:
                return runner.observed(sketched=sketched)
            # what asks every module for its types would be compiled with it
            seen = runner.observed(sketched=sketched, typed=False)
            return seen.model_copy(update={"coarsest": coarsest(_types(workload))})

    with runner.prepared("plain training" if choices is None else "the plan"):
        return deterministically(observed) if payload["deterministic"] else observed()


def checked_step(runner: StepRunner, payload: dict[str, Any]) -> DivergenceCheck:
    """What sentinels over all that is recomputed or offloaded have checked in one step under ``payload["choices"]``."""
    workload, choices = runner.workload, payload["choices"]
    with (
        runner.prepared("the plan"),
        attach(workload.model, choices, host_budget=runner.host_budget, sentinels="all") as session,
    ):
        runner.seed()
        with _restored(workload):
            workload.full_step() if workload.full_step is not None else workload.forward_backward()
    return session.sentinels


@contextmanager
def _restored(workload: Step) -> Iterator[None]:
    """Restore everything after a user's own cycle, which changes weights; ours leaves only gradients and buffers."""
    with ExitStack() as stack:
        if workload.full_step is None:
            stack.enter_context(kept_state(workload.model))
        else:
            stack.callback(Snapshot(workload).restore)
        yield


def _types(workload: Step) -> list[str]:
    """The floating point types of a model's weights and of its autocast."""
    types = {p.dtype for p in workload.model.parameters() if p.is_floating_point()}
    if workload.spec is not None and workload.spec.autocast is not None:
        types.add(DTYPES[workload.spec.autocast])
    return [str(dtype).removeprefix("torch.") for dtype in types]
