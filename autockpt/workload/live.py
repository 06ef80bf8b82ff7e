"""Workloads from objects that the user already has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.workload.core import Step, Workload
from autockpt.workload.losses import default_step
from autockpt.workload.settings import describe
from autockpt.workload.storages import nested_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def from_live(
    model: nn.Module,
    batch: Any,
    *,
    step: Step | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | str | None = None,
    full_step: Callable[[], Any] | None = None,
    snapshot: tuple[Any, ...] = (),
) -> Workload:
    """A workload around a live model; nothing is run, copied or changed.

    Without ``step`` the batch must be a mapping that the model computes its loss from. ``full_step`` replaces the whole
    cycle and needs ``snapshot`` or ``optimizer``: whatever else its steps change. Raises WorkloadError for arguments
    that cannot make a training step.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"the model is a {type(model).__name__}", remedy="Pass a torch.nn.Module.")
    _check_batch(batch, step, full_step)
    _check_numbers(accumulate, max_grad_norm)
    _check_full_step(full_step, step, optimizer, snapshot)
    workload = Workload(
        model=model,
        batch=batch,
        step=step or default_step(model, batch),
        optimizer=optimizer,
        scaler=scaler,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        autocast=_dtype(autocast),
        full_step=full_step,
        snapshot=tuple(snapshot),
        notes=_notes(model),
    )
    _check_trainable(workload)
    _check_device(workload)
    workload.settings = describe(workload)
    return workload


def _check_batch(batch: Any, step: Step | None, full_step: Callable[[], Any] | None) -> None:
    for name, function in (("step", step), ("full_step", full_step)):
        if function is not None and not callable(function):
            raise WorkloadError(f"{name} is a {type(function).__name__}, not a function", remedy="Pass a function.")
    if step is None and full_step is None and not isinstance(batch, Mapping):
        raise WorkloadError(
            f"the batch is a {type(batch).__name__}, so it is not known how to compute a loss from it",
            remedy="Pass step=, a function (model, batch) -> loss, or a dict of the model's arguments with labels.",
        )


def _check_numbers(accumulate: int, max_grad_norm: float | None) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise WorkloadError(f"accumulate is {accumulate!r}", remedy="Pass the number of micro-batches, 1 or more.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise WorkloadError(f"max_grad_norm is {max_grad_norm!r}", remedy="Pass a number above zero, or None.")


def _check_full_step(
    full_step: Callable[[], Any] | None, step: Step | None, optimizer: Any, snapshot: tuple[Any, ...]
) -> None:
    if full_step is None:
        return
    if step is not None:
        raise WorkloadError(
            "step and full_step were both given", remedy="full_step replaces the whole cycle: drop step."
        )
    if optimizer is None and not snapshot:
        raise WorkloadError(
            "full_step was given without naming what else it changes",
            remedy="Name optimizers, schedulers, scalers, ... in snapshot=(...), so that they can be put back.",
        )


def _check_trainable(workload: Workload) -> None:
    trainable = {id(p) for p in workload.model.parameters() if p.requires_grad}
    if not trainable:
        raise WorkloadError(
            "no parameter of the model requires gradients, so there is no backward pass to plan",
            remedy="Call model.requires_grad_(True), or attach adapters first.",
        )
    if workload.optimizer is None or workload.full_step is not None:
        return
    held = {id(p) for group in workload.optimizer.param_groups for p in group["params"]}
    if not held & trainable:
        raise WorkloadError(
            "the optimizer holds no trainable parameter of this model",
            remedy="Create the optimizer from this model's parameters, after wrapping or moving it.",
        )


def _check_device(workload: Workload) -> None:
    device = workload.device
    for tensor in nested_tensors(workload.batch):
        if tensor.device.type != device.type:
            raise WorkloadError(
                f"the batch is on {tensor.device} and the model on {device}",
                remedy="Move the batch to the model's device first.",
            )


def _dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    if autocast is None or isinstance(autocast, torch.dtype):
        return autocast
    if autocast not in _DTYPES:
        raise WorkloadError(f"autocast is {autocast!r}", remedy="Pass torch.bfloat16, torch.float16, or None.")
    return _DTYPES[autocast]


def _notes(model: nn.Module) -> tuple[str, ...]:
    if not model.training:
        return ("the model is in eval mode: dropout is off and is not planned for",)
    return ()


def move(value: Any, device: torch.device) -> Any:
    """The same nesting of mappings, sequences and tensors on another device; other values as they are."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: move(item, device) for key, item in value.items()}
        return moved if type(value) is dict else _like(value, moved)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move(item, device) for item in value)
    to = getattr(value, "to", None)
    return to(device) if callable(to) and not isinstance(value, nn.Module) else value


def _like(original: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of the original's class, or a plain dict where that class cannot be made from one."""
    try:
        return type(original)(moved)
    except Exception:
        return moved
