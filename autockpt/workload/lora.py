"""LoRA: freeze the base model and train low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through PEFT."""

from __future__ import annotations

import warnings

from torch import nn

from autockpt.errors import UsageError, WorkloadError
from autockpt.workload.failures import summary
from autockpt.workload.units import discover_units, module_of


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model with adapters of this rank on PEFT's own choice of layers, or on every linear layer in its blocks.

    Raises UsageError where PEFT is missing, WorkloadError where there is nothing to adapt.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError("--lora needs the package peft", remedy="Install it: pip install peft") from None
    targets = _peft_targets(model) or _linear_names(model)
    if not targets:
        raise WorkloadError(
            "LoRA has nothing to adapt: the model's blocks hold no linear layers",
            remedy="Leave --lora out, or attach adapters yourself in a factory.",
        )
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # between PEFT and transformers, nothing a user can act on
            return get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise WorkloadError(
            f"peft cannot adapt this model: {summary(error)}",
            remedy="Attach adapters yourself in a factory.",
        ) from None


def _peft_targets(model: nn.Module) -> list[str] | None:
    """PEFT's defaults for the model type, as far as the model really has such layers."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    wanted = DEFAULTS.get(model_type, ())
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return [name for name in wanted if name in present] or None


def _linear_names(model: nn.Module) -> list[str]:
    """Last components of the names of all linear layers inside blocks."""
    names: set[str] = set()
    for unit in discover_units(model):
        if unit.role == "block":
            for name, module in module_of(model, unit.name).named_modules():
                if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                    names.add(f"{unit.name}.{name}".rpartition(".")[2])
    return sorted(names)
