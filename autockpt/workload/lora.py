"""LoRA: freeze the base model and train low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through PEFT."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.base import did_you_mean
from autockpt.schema.workload import WorkloadSpec, as_option
from autockpt.workload.failures import needed, summary
from autockpt.workload.quantised import is_quantised, prepare_for_training
from autockpt.workload.units import discover_units, modules_of

ALL_LINEAR = "all-linear"
_EXPERTS = (
    "Adapters on experts are PEFT's target_parameters: every forward multiplies both factors out to the size of all "
    "experts of a layer, and adds them to a copy of these. `lora_targets` with attention's layers avoids it."
)
_NOT_PREPARED = (
    "norms, embeddings and head keep their type; where the script calls PEFT's prepare_model_for_kbit_training, which "
    "turns them to fp32, add `prepare_kbit`"
)


def adapt(model: nn.Module, spec: WorkloadSpec) -> tuple[nn.Module, list[str]]:
    """The model with the adapters that a spec asks for, and what was assumed; the model itself where it asks for none.

    Raises UsageError where PEFT or a rank is missing, or for quantised weights without adapters, which nothing can
    train; WorkloadError where there is nothing to adapt.
    """
    prepared = [prepare_for_training(model)] if spec.prepare_kbit else []
    if spec.lora is None:
        for name in ("lora_targets", "lora_dora", "lora_modules_to_save"):
            if getattr(spec, name):
                raise UsageError(f"{as_option(name)} needs --lora", remedy="Add --lora RANK.")
        if spec.load_in_4bit or spec.load_in_8bit or spec.quantization:
            raise UsageError("quantised weights cannot be trained", remedy="Add adapters: --lora 16.")
        if spec.prepare_kbit:
            raise UsageError("`prepare_kbit` freezes all weights", remedy="Add adapters: --lora 16.")
        return model, []
    whole = _names(spec.lora_modules_to_save)
    adapted, notes = add_lora(model, spec.lora, targets=spec.lora_targets, dora=spec.lora_dora, whole=whole)
    packed = any(map(is_quantised, adapted.parameters()))
    return adapted, [*prepared, *notes, *([_NOT_PREPARED] if packed and not prepared else [])]


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    targets: str | None = None,
    dora: bool = False,
    whole: list[str] | None = None,
) -> tuple[nn.Module, list[str]]:
    """The model with adapters of this rank, and what was assumed, for people.

    ``targets``: ``all-linear``, or names of layers with commas; by default PEFT's own choice for the model's type, or
    every linear layer in its blocks. ``whole``: names of modules that are trained as they are beside the adapters.
    Raises UsageError where PEFT is missing, WorkloadError where there is nothing to adapt.
    """
    # tables that packages make as they are imported are no part of the step
    with needed("--lora needs the package peft", "Install it: pip install peft"), _disable_current_modes():
        from peft import LoraConfig, get_peft_model
        from peft.import_utils import is_bnb_available

        if is_bnb_available():
            importlib.import_module("peft.tuners.lora.bnb")
    chosen, why = _targets(model, targets)
    if not chosen:
        raise WorkloadError(
            "LoRA has nothing to adapt: the model's blocks hold no linear layers",
            remedy="Leave --lora out, or attach adapters yourself in a factory.",
        )
    scale, whole, present = 2 * rank, whole or None, [name for name, _ in model.named_modules()]
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=chosen, use_dora=dora, modules_to_save=whole)
    try:
        with warnings.catch_warnings(action="ignore"):  # between PEFT and transformers, nothing a user can act on
            adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"peft cannot adapt this model: {summary(error)}",
            remedy=_nearest(present, _unmatched(present, _names(targets)))
            + "Correct `lora_targets` or `lora_modules_to_save`, or attach adapters yourself in a factory.",
        ) from None
    # as PEFT has them by now: it takes older names for the experts of some models
    known: Any = vars(adapted.peft_config["default"]).get("target_modules")
    if targets not in (None, ALL_LINEAR) and not isinstance(known, str):
        _refuse_unmatched(present, "`lora_targets`", known or ())
    _refuse_unmatched(present, "`lora_modules_to_save`", whole or ())
    experts = any(type(module).__name__ == "ParamWrapper" for module in adapted.modules())
    return adapted, [_assumed(adapted, rank, why, dora, whole), *([_EXPERTS] if experts else [])]


def _targets(model: nn.Module, wanted: str | None) -> tuple[str | list[str] | None, str]:
    """What PEFT is told, and where it comes from."""
    if wanted == ALL_LINEAR:
        return ALL_LINEAR, ""
    if wanted is not None:
        return _names(wanted), ""
    if (own := _peft_targets(model)) is not None:
        return own, ", PEFT's choice for this type of model"
    return _linear_names(model), ", every linear layer in the blocks"


def _unmatched(present: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The wanted names that no module has, nor ends in."""
    ends = {".".join(parts[i:]) for parts in (name.split(".") for name in present) for i in range(len(parts))}
    return [name for name in wanted if name not in ends]


def _refuse_unmatched(present: list[str], option: str, wanted: Iterable[str]) -> None:
    """PEFT says nothing of a name that matches no module where another one does."""
    if unmatched := sorted(_unmatched(present, wanted)):
        one = unmatched[0]
        raise WorkloadError(
            f"no module of the model is named {one!r}, which {option} names",
            remedy=f"{_nearest(present, [one])}Name modules, by the end of their names or in full.",
        )


def _nearest(present: Iterable[str], unmatched: list[str]) -> str:
    if not unmatched:
        return ""
    wanted = unmatched[0]
    return did_you_mean(wanted, present if "." in wanted else {name.rpartition(".")[2] for name in present})


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _assumed(model: nn.Module, rank: int, why: str, dora: bool, whole: list[str] | None) -> str:
    """Where the adapters are and what they are made of, read off the adapted model."""
    found = [(name.partition(".lora_A."), parameter.dtype) for name, parameter in model.named_parameters()]
    names = dict.fromkeys(place.rpartition(".")[2] for (place, adapter, _), _ in found if adapter)
    types = dict.fromkeys(str(dtype).removeprefix("torch.") for (_, adapter, _), dtype in found if adapter)
    kind = "DoRA" if dora else "LoRA"
    kept = f"; {', '.join(whole)} trained whole" if whole else ""
    made_of = f"scaled by 2, no dropout, adapters in {', '.join(types)}"
    return f"{kind} of rank {rank} on {', '.join(names)}{why}: {made_of}{kept}"


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
    blocks = [unit.name for unit in discover_units(model) if unit.role == "block"]
    for block, found in zip(blocks, modules_of(model, blocks), strict=True):
        for name, module in found.named_modules(prefix=block):
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                names.add(name.rpartition(".")[2])
    return sorted(names)
