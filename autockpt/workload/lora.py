"""LoRA: freeze the base model and train low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through PEFT."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.workload import WorkloadSpec, as_option
from autockpt.workload.failures import needed, summary
from autockpt.workload.quantised import is_quantised, prepare_for_training

_EXPERTS = (
    "Adapters on experts are PEFT's target_parameters: every forward multiplies both factors out to the size of all "
    "experts of a layer, and adds them to a copy of these. `target_modules` with attention's layers avoids it."
)
_NOT_PREPARED = (
    "Norms, embeddings and head keep their type; where the script calls PEFT's prepare_model_for_kbit_training, which "
    "turns them to fp32, add `prepare_kbit`."
)


def adapt(model: nn.Module, spec: WorkloadSpec) -> tuple[nn.Module, list[str]]:
    """The model with the adapters that a spec asks for, and what was assumed; the model itself where it asks for none.

    Where the spec names no layers, PEFT chooses them by the type of the model; of a type that it does not know, all
    linear ones. Raises UsageError where PEFT is missing, and for frozen weights without adapters, which nothing can
    train; WorkloadError where PEFT cannot adapt the model.
    """
    if spec.lora is None:
        if frozen := [name for name in ("load_in_4bit", "quantization", "prepare_kbit") if getattr(spec, name)]:
            raise UsageError(
                f"{as_option(frozen[0])} leaves weights that cannot be trained", remedy="Add adapters: --lora 16."
            )
        return model, []
    notes = [prepare_for_training(model)] if spec.prepare_kbit else []
    # tables that packages make as they are imported are no part of the step
    with needed("--lora needs the package peft", "Install it: pip install peft"), _disable_current_modes():
        from peft import LoraConfig, get_peft_model
        from peft.import_utils import is_bnb_available
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        if is_bnb_available():
            importlib.import_module("peft.tuners.lora.bnb")
    asked = spec.lora if isinstance(spec.lora, dict) else {"r": spec.lora}
    # by name, as PEFT's conversion for transformers 5 loses those of Mixtral that it chooses itself
    kind = getattr(getattr(model, "config", None), "model_type", "")
    asked = {"target_modules": KNOWN.get(kind, "all-linear")} | asked
    try:
        with warnings.catch_warnings(action="ignore"):  # between PEFT and transformers, nothing a user can act on
            adapted: Any = get_peft_model(model, LoraConfig(**asked))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"peft cannot adapt this model: {summary(error)}",
            remedy="Correct `lora`, whose keys are arguments of peft.LoraConfig; or attach adapters yourself in a "
            "factory.",
        ) from None
    factors = {name.partition(".lora_A.")[0]: p.dtype for name, p in adapted.named_parameters() if ".lora_A." in name}
    layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in factors))
    types = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in factors.values()))
    notes.append(f"LoRA of rank {rank_of(adapted)} on {layers}, adapters in {types}.")
    if any(type(module).__name__ == "ParamWrapper" for module in adapted.modules()):
        notes.append(_EXPERTS)
    if not spec.prepare_kbit and any(map(is_quantised, adapted.parameters())):
        notes.append(_NOT_PREPARED)
    return adapted, notes


def rank_of(model: Any) -> int | None:
    """The rank of a model's LoRA adapters; None where it has none."""
    return next((config.r for config in getattr(model, "peft_config", {}).values() if hasattr(config, "r")), None)
