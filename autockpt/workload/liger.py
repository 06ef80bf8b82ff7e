"""Liger Kernel (Hsu et al. 2024, arXiv:2410.10989): its kernels in place of a transformers model's own parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import UsageError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.failures import needed


def apply_liger(model: nn.Module) -> None:
    """What ``TrainingArguments(use_liger_kernel=True)`` does: fused loss, norms, activations and rotary embeddings.

    Raises UsageError where the package is missing or has no kernels for this type of model.
    """
    what = "`liger` needs the packages liger-kernel and triton, though no GPU"
    with needed(what, "Install them: pip install liger-kernel triton"), _disable_current_modes():
        import liger_kernel.transformers.monkey_patch as liger  # type: ignore[import-not-found]
        from transformers.integrations.liger import apply_liger_kernel
    kind: Any = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(
            f"Liger Kernel has no kernels for {kind}", remedy="Leave `liger` out; transformers then trains without it."
        )
    apply_liger_kernel(model, None)


def refuse_liger_on(spec: WorkloadSpec, device: torch.device) -> None:
    """Raise UsageError where its kernels do not run."""
    if spec.liger and device.type == "cpu":
        raise UsageError(
            "Liger Kernel runs on accelerators alone",
            remedy="Simulate it for a card with --hardware, or leave `liger` out.",
        )
