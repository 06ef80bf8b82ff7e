"""Applying a plan to a live model: read it, find its choices for this model, attach them.

``apply`` reads from top to bottom; what it calls stands below it in that order, and last the handle that it returns.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from autockpt.checkpointing.divergence import DivergenceCheck, Mode
from autockpt.errors import PlanError, UsageError
from autockpt.policies.base import device_of
from autockpt.runtime.adaptive import Adaptive, Move, leaner_choices, metered
from autockpt.runtime.choice_sets import BatchSets, attach_sets
from autockpt.runtime.session import Session, attach, compiled_as
from autockpt.schema.choices import Choice, with_plan_errors
from autockpt.schema.plan import Plan
from autockpt.schema.run_directory import plan_at
from autockpt.schema.sizes import parse_budget
from autockpt.workload.step import weights_dtype
from autockpt.workload.units import discover_head, discover_units, plan_units


def apply(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    sentinels: Mode | None = None,
    adaptive: bool | str = False,
) -> Handle:
    """Apply a plan, its file, a run's directory, or choices by unit name to a live model.

    They act whenever gradients are enabled.

    Nothing about the model changes but what its forward keeps: no submodule is replaced, ``state_dict``, parameter
    names, class and config stay as they are.

    A plan with sets of choices for smaller batches goes, at each forward, by the first set that covers the batch at
    hand (rows × padded length), and by the leanest for larger ones than any, which a warning says once; a backward goes
    by what its forward went by. Where weights are sharded, all ranks go by the largest of their batches.

    With ``adaptive`` a batch that by what was seen would not fit what is free when its accumulation begins, of the
    plan's budget (or of a size such as "24GB", or of what others leave of the device), takes a leaner set, and its own
    again where there is room. The logger ``autockpt`` and the handle tell of each move.
    The leaner choices are the plan's own for larger batches, then recomputing what units keep. Where the device tells
    no peak while training, as a CPU, nothing is moved, and a note says so.

    The model may be compiled, before or afterwards, its layers in place or as a whole. Where the plan's numbers were
    found under other circumstances (dtype, LoRA, compiled layers, kind of device, and later a larger batch), one
    warning says that its promise does not hold here.

    While training, sentinels compare what backward is given with what forward had computed: every unit's first calls,
    then ever fewer, at last one of 512 (``sentinels="sample"``, also by the environment variable
    ``AUTOCKPT_SENTINELS``), every call (``"all"``) or none (``"off"``). A mismatch ends that backward with a
    ConflictError that names the unit, before the optimizer's step unless that is itself a hook of backward. Other ranks
    of a distributed training then see this one gone, as after any exception.

    Raises PlanError where the plan is malformed or belongs to another model; RunDirectoryError where a directory holds
    none; ConflictError where it cannot be attached safely; UsageError for other ``sentinels``, and for what is no
    model.
    """
    plan = _read(model, plan)
    sets = [(each.when, choices_for(model, each)) for each in plan.sets]
    notes = _doubts(plan, model)
    limit = _limit(adaptive, plan)  # an error is raised where the device reports no peak, too
    if notes:
        warnings.warn(f"the plan's promise does not hold here: {'; '.join(notes)}", stacklevel=2)
    options: dict[str, Any] = {"host_budget": plan.host_budget_bytes, "sentinels": sentinels}
    device = metered(device_of(model)) if adaptive else None
    if device is not None or len(sets) > 1:
        session = attach_sets(model, sets, leaner=leaner_choices(sets[-1][1]) if device is not None else (), **options)
        if device is not None:
            session.adaptive = Adaptive(model, device, limit, len(session.sessions))
    else:
        session = attach(model, sets[0][1], **options)
        if (guard := session.guard) is not None and plan.status != "unmeasured":  # sets know their sizes themselves
            sizes = [plan.settings.get(name) for name in ("batch_size", "seq_len")]
            guard.planned = tuple(size if type(size) is int else None for size in sizes)
    if adaptive and device is None:
        notes.append(f"adaptive does nothing: a {device_of(model).type} device reports no peak memory during training")
        logging.getLogger("autockpt").warning("%s", notes[-1])
    return Handle(plan, sets[-1][1], session, notes)


def _read(model: nn.Module, plan: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """The plan as data. Raises UsageError for what is none, or no model."""
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan | Mapping | str | Path):
        raise UsageError(
            f"a plan is applied to a torch.nn.Module, not a {type(plan).__name__} to a {type(model).__name__}",
            remedy="Give the model that trains, and then a plan file's path, a Plan, or choices by unit name: "
            "autockpt.apply(model, {'model.layers.0': 'recompute'}).",
        )
    return plan_of(plan)


def plan_of(plan: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """A plan, its file, a run's directory, or choices by unit name, as data. Raises PlanError where it is malformed."""
    if isinstance(plan, Mapping):
        return with_plan_errors(Plan.model_validate, {"choices": dict(plan)})
    return plan if isinstance(plan, Plan) else plan_at(Path(plan))


def choices_for(model: nn.Module, plan: Plan) -> dict[str, Choice]:
    """The plan's choice for every unit of a live model, by name. Raises PlanError where it belongs to another model."""
    units, head = plan_units(model, plan.settings.get("units"), list(plan.choices)), discover_head(model)
    if not units and (head is None or head.name not in plan.choices):
        raise PlanError(
            f"{type(model).__name__} has no repeated blocks, nor modules that the plan names",
            remedy="Apply the plan to the model it was made for; `autockpt explain` shows a model's units.",
        )
    return plan.choices_for(units, head)


def _doubts(plan: Plan, model: nn.Module) -> list[str]:
    """Why the plan's promise about memory and time may not hold for this model. Empty for plans without a promise."""
    if plan.status == "unmeasured":
        return []
    doubts = []
    planned_dtype, dtype = plan.settings.get("dtype"), weights_dtype(model.parameters())
    if planned_dtype and dtype and planned_dtype != dtype:
        doubts.append(f"the weights are {dtype}, planned as {planned_dtype}")
    planned_lora = plan.workload is not None and plan.workload.lora is not None
    lora = any("lora_" in name for name, _ in model.named_parameters())
    if plan.workload is not None and planned_lora != lora:
        doubts.append("the model has LoRA adapters, planned without" if lora else "planned with LoRA adapters")
    compiled = compiled_as(model, [unit.name for unit in discover_units(model) if unit.role == "block"])
    if compiled not in (None, plan.compile):
        doubts.append(f"the model is compiled ({compiled}), planned {plan.compile or 'uncompiled'}")
    if plan.environment is not None:
        here = device_of(model).type
        if here not in ("meta", plan.environment.device.kind):
            doubts.append(f"the model is on {here}, planned for {plan.environment.device.kind}")
    return doubts


def _limit(adaptive: bool | str, plan: Plan) -> int | None:
    """Bytes that adaptive training stays below: as asked for, else the plan's budget; None for all that there is.

    Raises UsageError for what is no size, and for a plan that cannot move.
    """
    if adaptive and plan.compile == "model":
        raise UsageError("a model that is compiled as one graph cannot move", remedy="Leave adaptive= out.")
    if not isinstance(adaptive, str):
        return plan.budget.whole if plan.budget is not None else None
    budget = parse_budget(adaptive)
    budget.refuse_share("is not known while training")
    return budget.size


class Handle:
    """A plan applied to a model. ``print`` shows it; a context manager that removes it at the end.

    ``attached`` says in words what is done with each unit's activations, ``sentinels`` what has been checked while
    training, ``notes`` why the plan's promise about memory and time may not hold here. Of a plan with sets of choices
    for smaller batches, ``choices`` and ``attached`` are those of the largest; ``print`` shows them all.
    """

    def __init__(self, plan: Plan, choices: Mapping[str, Choice], session: Session, notes: Sequence[str]) -> None:
        self.plan = plan
        self.choices = dict(choices)
        self.attached = session.attached
        self.notes = tuple(notes)
        self._session = session
        self._removed = False

    @property
    def sentinels(self) -> DivergenceCheck:
        """What has been checked so far: units, forward passes, tensors, and what could not be."""
        return self._session.sentinels

    @property
    def moves(self) -> tuple[Move, ...]:
        """How ``adaptive`` went leaner and back, in order."""
        adaptive = self._session.adaptive if isinstance(self._session, BatchSets) else None
        return tuple(adaptive.moves) if adaptive is not None else ()

    def remove(self) -> None:
        """Take the plan off again; the model is exactly as it was. Idempotent."""
        self._removed = True
        self._session.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def __str__(self) -> str:
        state = "removed" if self._removed else "applied"
        why = self.plan.status_reason
        if self.plan.status == "simulated" and self.plan.environment is not None:
            why = f"for {self.plan.environment.device.name}, never measured"
        head = f"autockpt plan, {self.plan.status}{f' ({why})' if why else ''}, {state}:"
        return "\n".join([head, *self._session.describe(), *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__
