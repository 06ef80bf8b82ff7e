"""A plan in transformers' Trainer and everything derived from it (TRL's SFTTrainer): a callback."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from autockpt.errors import ConflictError
from autockpt.runtime import Handle, apply
from autockpt.schema.plan import Plan

_log = logging.getLogger(__name__)
_SPELLINGS = ("activation_checkpointing", "gradient_checkpointing")
# options that only make sense where somebody wants the Trainer's own; the others go with defaults of some trainers
_TELLING = ("every_n_layers", "offload", "selective")


class AutockptCallback(TrainerCallback):
    """Applies a plan, or a plan file, while a Trainer trains.

        Trainer(model, args, callbacks=[autockpt.AutockptCallback("plan.yaml")], …).train()

    The plan is on the model from the moment when the Trainer has prepared it until training ends; ``handle`` says what
    was attached, ``remove`` takes it off where training was interrupted. Evaluation, ``generate`` and saving in between
    see the model as it is without a plan.

    Raises PlanError for a malformed plan at once; ConflictError when the Trainer is made or training begins and the
    Trainer's arguments ask for activation checkpointing of its own: one of the two must be switched off.
    """

    def __init__(self, plan: Plan | str | Path) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        self.handle: Handle | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        refuse_own_checkpointing(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        refuse_own_checkpointing(args)
        self.remove()  # left from a run that was interrupted, or that is tried again with a smaller batch
        model: nn.Module = kwargs["model"]
        self.handle = apply(model, self.plan)
        if state.is_world_process_zero:
            _log.info("%s", self.handle)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the plan off the model where it is still on. Idempotent."""
        if self.handle is not None:
            self.handle.remove()


def refuse_own_checkpointing(args: Any) -> None:
    """Raise ConflictError where training arguments ask for activation checkpointing or offloading beside the plan's.

    Both spellings count (``activation_checkpointing``, ``gradient_checkpointing``), FSDP's option, TRL's offloading,
    and options of the Trainer's own even where that is off: whoever set them expects something of them.
    """
    asked: list[str] = []
    for name in _SPELLINGS:
        on, options = getattr(args, name, False), _telling(args, f"{name}_kwargs")
        asked = [f"{name}=True"] * bool(on) + [f"{name}_kwargs={options}"] * bool(options)
        if asked:
            break  # the Trainer mirrors one spelling in the other
    if getattr(args, "activation_offloading", False):
        asked.append("activation_offloading=True")
    fsdp = getattr(args, "fsdp_config", None)
    if isinstance(fsdp, Mapping) and any(_on(fsdp, prefix + _SPELLINGS[0]) for prefix in ("", "fsdp_")):
        asked.append(f"fsdp_config={{'{_SPELLINGS[0]}': True}}")
    if not asked:
        return
    raise ConflictError(
        f"{type(args).__name__} has {', '.join(asked)}, and AutockptCallback is to apply a plan: a layer can follow "
        "only one of them",
        remedy="The plan wins where the arguments leave activations alone: pass activation_checkpointing=False "
        "(gradient_checkpointing=False in older versions and in TRL, where it is on by default), without its options. "
        "To train with the Trainer's own instead, leave AutockptCallback out.",
    )


def _telling(args: Any, name: str) -> dict[str, Any]:
    options = getattr(args, name, None)
    return {k: v for k, v in options.items() if k in _TELLING and v} if isinstance(options, Mapping) else {}


def _on(options: Mapping[str, Any], name: str) -> bool:
    return str(options.get(name, "")).lower() in ("true", "1", "yes")
