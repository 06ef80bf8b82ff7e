"""The default loss function: call the model with the batch and take the loss it computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.workload.units import unwrap

_REMEDY = (
    "Put labels into the batch so that the model computes its loss, or pass loss=, a function (model, batch) -> loss."
)


def loss_of(model: nn.Module, batch: Mapping[str, Any], **extra: Any) -> Tensor:
    """Forward with the batch as keyword arguments; the loss that the model returns, else WorkloadError."""
    return find_loss(model(**batch, **extra))


def find_loss(output: Any) -> Tensor:
    """The loss in what a model returned: ``.loss``, ``["loss"]``, or a single number by itself or in first place.

    Raises WorkloadError where there is none, or several and nothing else.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        parts = output if isinstance(output, (tuple, list)) and output else [output]
        numbers = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0]
        if len(numbers) == len(parts) > 1:
            raise WorkloadError(
                f"the model returned {len(numbers)} losses, and it is not known how they are put together",
                remedy="Pass loss=, a function (model, batch) -> loss that returns one number, such as their sum.",
            )
        first = parts[0]
        loss = first if isinstance(first, Tensor) and first.dim() == 0 else None
    if loss is None:
        raise WorkloadError(f"the model returned no loss, but {_named(output)}", remedy=_REMEDY)
    return loss


def output_of(model: nn.Module, batch: Any, **extra: Any) -> Any:
    """What a stage makes of its batch (arguments by name, in order, or one); the loss alone where it returns one."""
    in_order = isinstance(batch, tuple | list)
    output = model(**batch, **extra) if isinstance(batch, Mapping) else model(*batch) if in_order else model(batch)
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


def default_loss(model: nn.Module, batch: Any, *, of_stage: bool = False) -> Any:
    """``loss_of`` for this model: with ``use_cache=False`` where its forward takes that; its config stays untouched.

    ``output_of`` for one ``of_stage``. Raises WorkloadError for a batch that is not the model's arguments by name.
    """
    function = output_of if of_stage else loss_of
    if not isinstance(batch, Mapping):
        if of_stage:
            return function
        raise WorkloadError(
            f"the batch is a {type(batch).__name__}, so it is not known how to compute a loss from it",
            remedy="Pass loss=, a function (model, batch) -> loss, or a dict of the model's arguments with labels.",
        )
    if "use_cache" not in batch and takes_use_cache(model):
        return partial(function, use_cache=False)
    return function


def takes_use_cache(model: nn.Module) -> bool:
    """Whether forward understands ``use_cache``, looking through wrappers (PEFT, DDP, compile).

    By a parameter of that name, or by passing it on to a generating model inside.
    """
    inner = inner_model(model)
    try:
        parameters = inspect.signature(inner.forward).parameters
    except (TypeError, ValueError):
        return False
    if "use_cache" in parameters:
        return True
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    generates = getattr(inner, "can_generate", None)
    config = getattr(inner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    return callable(generates) and bool(generates()) and bool(getattr(text, "use_cache", False))


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside PEFT, DDP, compile and FSDP wrappers."""
    while True:
        inner = unwrap(model)
        if hasattr(inner, "peft_config") and callable(getattr(inner, "get_base_model", None)):
            inner = inner.get_base_model()  # type: ignore[operator]
        elif isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def _named(output: Any) -> str:
    keys = list(output) if isinstance(output, Mapping) else []
    return f"{type(output).__name__}({', '.join(map(str, keys))})" if keys else f"a {type(output).__name__}"
