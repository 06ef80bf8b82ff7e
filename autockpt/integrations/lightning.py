"""A plan in Lightning's Trainer: a callback, for ``lightning`` and for ``pytorch_lightning``."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from autockpt.errors import PlanError, UsageError
from autockpt.runtime import Handle, apply, choices_for
from autockpt.schema.plan import Plan

_log = logging.getLogger(__name__)
_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of the libraries that are loaded already, else of those that are installed.

    The two are different classes, and a script that uses one should not have to wait for the other.
    """
    loaded = [name for name in _LIBRARIES if name in sys.modules]
    installed = [name for name in _LIBRARIES if find_spec(name.partition(".")[0]) is not None]
    found = loaded or installed
    if not found:
        raise UsageError(
            "the Lightning callback needs lightning or pytorch_lightning, and neither is installed",
            remedy="Install one (pip install lightning), or use autockpt.apply in a loop of your own.",
        )
    return tuple(import_module(name).Callback for name in found)


class AutockptLightningCallback(*_callback_classes()):  # type: ignore[misc]
    """Applies a plan, or a plan file, while a Lightning Trainer fits.

        Trainer(callbacks=[AutockptLightningCallback("plan.yaml")], …).fit(module)

    The plan goes onto the model when the strategy has set it up and comes off when fitting ends, fails or is
    interrupted; ``handle`` says what was attached. Validation in between sees the model as it is without a plan.

    Raises PlanError for a malformed plan at once, and when fitting starts PlanError for one of another model,
    ConflictError where the model's or the strategy's own activation checkpointing is on.
    """

    def __init__(self, plan: Plan | str | Path) -> None:
        super().__init__()
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        self.handle: Handle | None = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.remove()
        self.handle = apply(called_part(pl_module, self.plan), self.plan)
        if getattr(trainer, "is_global_zero", True):
            _log.info("%s", self.handle)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.remove()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.remove()

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the plan off the model where it is still on. Idempotent."""
        if self.handle is not None:
            self.handle.remove()


def called_part(module: nn.Module, plan: Plan) -> nn.Module:
    """The part of a LightningModule that ``training_step`` calls: its one child that the plan fits, else itself.

    Lightning calls ``training_step``, seldom the module's ``forward``. What a plan keeps at its root (the KV cache off,
    the ends of forward passes) must sit where calls really come by.
    """
    parts = [c for c in module.children() if not isinstance(c, (nn.ModuleList, nn.ModuleDict)) and _fits(c, plan)]
    return parts[0] if len(parts) == 1 else module


def _fits(module: nn.Module, plan: Plan) -> bool:
    try:
        choices_for(module, plan)
    except PlanError:
        return False
    return True
