"""Units that the user's own code runs inside of ``torch.utils.checkpoint``: two owners of one activation.

What such a unit saves is dropped by that checkpoint, which runs it again in backward as plain training does, without
putting back what its forward has changed. To be bit for bit plain training the unit's choice stands aside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

hooks_in_force: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None]
hooks_in_force = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


def inside_checkpoint() -> bool:
    """Whether a ``torch.utils.checkpoint`` (not the reentrant one, which sets gradients aside) is around what runs."""
    hooks = hooks_in_force(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def warn_inside(unit: str) -> None:
    """Say that a unit's choice does nothing."""
    warnings.warn(
        f"{unit} runs inside of a torch.utils.checkpoint, which drops what it saves and runs it again in backward: "
        "there its choice does nothing. Take the checkpoint away for the plan to act.",
        stacklevel=4,
    )
