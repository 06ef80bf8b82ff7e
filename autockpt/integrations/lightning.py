"""The callback for Lightning's Trainer (``lightning``, ``pytorch_lightning``): applies a plan or searches for one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.optim import LBFGS

from autockpt.errors import PlanError, UsageError
from autockpt.integrations.at_start import PlanCallback, found_once, refuse_search
from autockpt.runtime import choices_for
from autockpt.schema.plan import Plan
from autockpt.workload import Step, ddp_of, discover_units, find_loss, move

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of the libraries that are loaded already, else of those that are installed.

    The two are different classes, and a script that uses one should not have to wait for the other.
    """
    loaded = [name for name in _LIBRARIES if name in sys.modules]
    found = loaded or [name for name in _LIBRARIES if find_spec(name.partition(".")[0]) is not None]
    if not found:
        raise UsageError(
            "the Lightning callback needs lightning or pytorch_lightning, and neither is installed",
            remedy="Install one (pip install lightning), or use autockpt.apply in a loop of your own.",
        )
    return tuple(import_module(name).Callback for name in found)


class AutockptLightningCallback(PlanCallback, *_callback_classes()):  # type: ignore[misc]
    """Applies a plan while a Lightning Trainer fits: one from a file, or one that it searches for as training starts.

        Trainer(callbacks=[AutockptLightningCallback("plan.yaml")], …).fit(module)
        Trainer(callbacks=[AutockptLightningCallback(budget="24GB")], …).fit(module)

    A plan goes onto the model when the strategy has set it up and comes off when fitting ends, fails or is
    interrupted; ``handle`` says what was attached. Validation in between sees the model as it is without a plan.

    With ``budget`` the search measures ``training_step`` with the first batch, or the longest rows of its data set, as
    ``AutockptCallback`` does for transformers' Trainer; ``timeout``, ``out`` (default: ``autockpt`` in the Trainer's
    root directory) and further options are those of that class.
    What ``training_step`` logs meanwhile is dropped.

    Raises UsageError unless exactly one of plan and budget is given, and PlanError for a malformed plan, both at once;
    when fitting starts PlanError for one of another model, ConflictError where the model's or the strategy's own
    activation checkpointing is on; before the first step UsageError where no search is possible (sharded strategies,
    manual optimization, several optimizers), InfeasibleError where nothing fits the budget.
    """

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.remove()
        self.handle = None
        if self.plan is not None:
            self._apply(self.plan, called_part(pl_module, self.plan), aloud=_is_first(trainer))
        else:
            _refuse_unsearchable(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        if self.handle is None and self.plan is None:
            found = found_once(lambda: _search(trainer, pl_module, self.find_plan, batch, batch_idx))
            bar = getattr(trainer.progress_bar_callback, "train_progress_bar", None)
            if (unpause := getattr(bar, "unpause", None)) is not None:  # tqdm's, which is to count training alone
                unpause()
            self._apply(found, called_part(pl_module, found), aloud=_is_first(trainer))

    def on_fit_end(self, trainer: Any, pl_module: nn.Module, *_: Any, **__: Any) -> None:
        self.remove()

    on_exception = teardown = on_fit_end


def _is_first(trainer: Any) -> bool:
    return getattr(trainer, "is_global_zero", True)


def _refuse_unsearchable(trainer: Any, module: Any) -> None:
    """Raise UsageError for training whose step cannot be taken by one process, or is not ours to take."""
    strategy = type(trainer.strategy).__name__
    reasons = {
        f"{strategy} needs every process for a step": strategy not in ("SingleDeviceStrategy", "DDPStrategy"),
        "manual optimization": not module.automatic_optimization,
        "several optimizers, or none": len(trainer.optimizers) != 1,
        "LBFGS, whose step calls the model itself": any(isinstance(o, LBFGS) for o in trainer.optimizers),
    }
    refuse_search("AutockptLightningCallback", reasons)


def _search(trainer: Any, module: Any, find: Callable[..., Plan], first: Any, index: int) -> Plan:
    """Search with the module's own ``training_step``, batch and optimizer; nothing of it is another afterwards."""
    loaders = trainer.fit_loop._combined_loader.flattened
    loader = loaders[0] if len(loaders) == 1 else None
    processes = trainer.world_size
    own = getattr(loader, "batch_size", None)

    def loss(model: nn.Module, batch: Any) -> Any:
        with trainer.precision_plugin.train_step_context():
            return find_loss(module.training_step(batch, index))

    def step(batch: Any) -> Step:
        return Step(
            called_part(module),
            move(batch, module.device),
            loss=loss,
            optimizer=trainer.optimizers[0],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            accumulate=trainer.accumulate_grad_batches,
            max_grad_norm=trainer.gradient_clip_val or None,
            snapshot=(module,),
            settings={
                "trainer": type(module).__name__,
                "autocast": trainer.precision,
                "processes": processes,
                "ddp": ddp_of(trainer.strategy.model),
            },
        )

    # what the module logs meanwhile is dropped
    with patch.dict(vars(module), dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)):
        return find(
            step,
            first,
            rows=own,
            steps=_steps_left(trainer),
            processes=processes,
            dataset=getattr(loader, "dataset", None),
            collate=getattr(loader, "collate_fn", None),
            folder=Path(trainer.default_root_dir) / "autockpt",
        )


def _steps_left(trainer: Any) -> int | None:
    """The optimizer steps that this training will still take; None where it has no end."""
    ends = [trainer.max_steps] if trainer.max_steps > 0 else []
    if (trainer.max_epochs or 0) > 0 and trainer.num_training_batches < math.inf:
        ends.append(math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches) * trainer.max_epochs)
    return max(0, min(ends) - trainer.global_step) if ends else None


def called_part(module: nn.Module, plan: Plan | None = None) -> nn.Module:
    """The part of a LightningModule that ``training_step`` calls: its one child that the plan fits, else itself.

    While there is no plan yet, the one child that has units. Lightning calls ``training_step``, seldom the module's
    ``forward``. What a plan keeps at its root (the KV cache off, the ends of forward passes) must sit where calls
    really come by.
    """

    def fits(part: nn.Module) -> bool:
        if plan is None:
            return bool(discover_units(part))
        try:
            choices_for(part, plan)
        except PlanError:
            return False
        return True

    parts = [c for c in module.children() if not isinstance(c, (nn.ModuleList, nn.ModuleDict)) and fits(c)]
    return parts[0] if len(parts) == 1 else module
