"""Applying a plan to a live model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from autockpt.errors import ConflictError, PlanError
from autockpt.policies.sentinels import Mode
from autockpt.runtime.by_batch import BatchSets, attach_sets
from autockpt.runtime.compiled import other_steps
from autockpt.runtime.gradients import compare
from autockpt.runtime.proving import Proof
from autockpt.runtime.session import Session, attach, without_kv_cache
from autockpt.schema.choices import Choice
from autockpt.schema.names import fold
from autockpt.schema.plan import Plan
from autockpt.workload.losses import default_loss
from autockpt.workload.step import short_dtype
from autockpt.workload.units import discover_head, discover_units, plan_units


class Handle:
    """A plan applied to a model. ``print`` shows it; a context manager that removes it at the end.

    ``attached`` says for every unit in words what was really attached, ``sentinels`` what has been checked of it while
    training, ``notes`` why the plan's promise about memory and time may not hold here. Of a plan with sets of choices
    for smaller batches, ``choices`` and ``attached`` are those of the largest; ``print`` shows them all.
    """

    def __init__(
        self, plan: Plan, choices: Mapping[str, Choice], session: Session | BatchSets, notes: Sequence[str]
    ) -> None:
        self.plan = plan
        self.choices = dict(choices)
        self.notes = tuple(notes)
        self._session = session
        self._removed = False

    @property
    def attached(self) -> dict[str, str]:
        """What was really attached, by unit."""
        return dict(self._session.attached)

    @property
    def sentinels(self) -> Proof:
        """What has been checked so far: units, steps, tensors, and what could not be."""
        return self._session.proof()

    def remove(self) -> None:
        """Take the plan off again; the model is exactly as it was. Idempotent."""
        self._removed = True
        self._session.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        state = "removed" if self._removed else "applied"
        why = self.plan.status_reason
        if self.plan.status == "simulated" and self.plan.environment is not None:
            why = f"for {self.plan.environment.device.name}, never measured"
        lines = [f"autockpt plan, {self.plan.status}{f' ({why})' if why else ''}, {state}:"]
        if isinstance(self._session, BatchSets):
            return "\n".join([*lines, *self._session.describe(), *(f"  note: {note}" for note in self.notes)])
        folded = fold(self.attached)
        width = max(map(len, folded), default=0)
        lines += [f"  {name:<{width}}  {words}" for name, words in folded.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def apply(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    check_batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    sentinels: Mode | None = None,
) -> Handle:
    """Apply a plan, a plan file, or choices by unit name to a live model; they act whenever gradients are enabled.

    Nothing about the model changes but what its forward keeps: no submodule is replaced, ``state_dict``, parameter
    names, class and config stay as they are. With ``check_batch`` two steps on it are compared with plain training
    before anything is applied for good, bit by bit, or within a tolerance where a choice is not exact
    (``loss(model, batch)`` gives the loss; default: the model's own); weights, gradients, buffers and random states are
    afterwards as before.

    A plan with sets of choices for smaller batches goes, at each forward, by the first set that covers the batch at
    hand (rows × padded length), and by the leanest for larger ones than any, which a warning says once; a backward goes
    by what its forward went by. Where weights are sharded, all ranks go by the largest of their batches.

    The model may be compiled, before or afterwards, its layers in place or as a whole. Where the plan's numbers were
    found under other circumstances (dtype, LoRA, kind of device, and later a larger batch or steps that are compiled
    otherwise), one warning says that its promise does not hold here.

    While training, sentinels compare what backward is given with what forward had computed: every unit's first calls,
    then each unit once in 499 steps (``sentinels="sample"``, also by the environment variable ``AUTOCKPT_SENTINELS``),
    every call (``"all"``) or none (``"off"``). A mismatch ends that backward with a ConflictError that names the unit,
    before the optimizer's step unless that is itself a hook of backward; other ranks of a distributed training then see
    this one gone, as after any exception.

    Raises PlanError where the plan is malformed or belongs to another model; ConflictError where it cannot be attached
    safely, or where the check finds a difference; UsageError for other ``sentinels``.
    """
    if not isinstance(plan, Plan | Mapping | str | Path):
        raise PlanError(
            f"a {type(plan).__name__} is no plan",
            remedy="Give a plan file's path, a Plan, or choices by unit name: {'model.layers.0': 'recompute'}.",
        )
    if isinstance(plan, Mapping):
        plan = Plan(choices=dict(plan))
    elif not isinstance(plan, Plan):
        plan = Plan.load(plan)
    sets = [(each.when, choices_for(model, each)) for each in plan.sets]
    choices = sets[-1][1]
    notes = _doubts(plan, model)
    for _, each in sets if check_batch is not None else ():
        _check(model, each, check_batch, loss)
    if len(sets) == 1:
        session = attach(model, choices, host_budget=plan.host_budget_bytes, sentinels=sentinels)
    else:
        session = attach_sets(model, sets, host_budget=plan.host_budget_bytes, sentinels=sentinels)
    if (guard := session.guard()) is not None and plan.status != "unmeasured":
        settings = plan.settings
        if len(sets) == 1:  # several know their sizes themselves
            guard.planned = (_whole(settings.get("batch_size")), _whole(settings.get("seq_len")))
        guard.warnings = other_steps(plan)
        guard.unlike_model = "model" in guard.warnings
        guard.blocks = tuple(u.name for u in discover_units(model) if u.role == "block")
    if notes:
        warnings.warn(f"the plan's promise does not hold here: {'; '.join(notes)}", stacklevel=2)
    return Handle(plan, choices, session, notes)


def choices_for(model: nn.Module, plan: Plan) -> dict[str, Choice]:
    """The plan's choice for every unit of a live model, by name. Raises PlanError where it belongs to another model."""
    units = plan_units(model, plan.settings.get("units"), list(plan.choices))
    if not units:
        raise PlanError(
            f"{type(model).__name__} has no repeated blocks, nor modules that the plan names",
            remedy="Apply the plan to the model it was made for; autockpt trace shows a model's units.",
        )
    return plan.choices_for(units, discover_head(model))


def _check(model: nn.Module, choices: Mapping[str, Choice], batch: Any, loss: Callable[..., Tensor] | None) -> None:
    """Raise ConflictError where two steps under the choices are not bit-equal with plain training."""
    run = loss or default_loss(model, batch)

    def forward_backward(between: Callable[[], None]) -> Tensor:
        loss = run(model, batch)
        between()
        loss.backward()
        return loss.detach()

    result = compare(
        model,
        forward_backward,
        lambda: attach(model, choices, sentinels="off"),
        lambda: without_kv_cache(model),
        exact=all(choice.exact for choice in choices.values()),
    )
    if not result.equal:
        raise ConflictError(
            f"under this plan the model does not train as it does without: {result.describe()}",
            remedy="Some unit's forward cannot be run twice with the same result. Set the units in question to save; "
            "applying a part of the plan at a time shows which.",
        )


def _doubts(plan: Plan, model: nn.Module) -> list[str]:
    """Why the plan's promise about memory and time may not hold for this model. Empty for plans without a promise."""
    if plan.status == "unmeasured":
        return []
    doubts = []
    planned_dtype, dtype = plan.settings.get("dtype"), _dtype_of(model)
    if planned_dtype and dtype and planned_dtype != dtype:
        doubts.append(f"the weights are {dtype}, planned as {planned_dtype}")
    planned_lora = plan.workload is not None and plan.workload.lora is not None
    lora = any("lora_" in name for name, _ in model.named_parameters())
    if plan.workload is not None and planned_lora != lora:
        doubts.append("the model has LoRA adapters, planned without" if lora else "planned with LoRA adapters")
    if plan.environment is not None:
        here = next((p.device.type for p in model.parameters()), "cpu")
        if here not in ("meta", plan.environment.device.kind):
            doubts.append(f"the model is on {here}, planned for {plan.environment.device.kind}")
    return doubts


def _dtype_of(model: nn.Module) -> str | None:
    """The type that most of the numbers in the weights have."""
    counts = Counter[str]()
    for p in model.parameters():
        counts[short_dtype(p.dtype)] += p.numel()
    return counts.most_common(1)[0][0] if counts else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
