"""A live model of transformers' under LoRA, its base in 4 bits: as it would be loaded so and adapted again.

For workloads of ghosts alone: the weights that take the place of the model's own are random.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import AutockptError, WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.configs import quiet
from autockpt.workload.quantised import is_quantised, put_quantised, quantization_of
from autockpt.workload.step import Step

_QLORA = WorkloadSpec(model="", load_in_4bit=True)


def can_be_in_four_bits(model: nn.Module) -> bool:
    """Whether ``in_four_bits`` can be made of a step with this model.

    For that it is a PEFT model with one set of LoRA adapters on a model of transformers' that has linear layers to
    quantise, none of which is quantised already or trained; and bitsandbytes is installed.
    """
    adapted: Any = model
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    if peft is None or transformers is None or not isinstance(adapted, peft.PeftModel):
        return False
    base = adapted.get_base_model()
    if not isinstance(base, transformers.PreTrainedModel) or any(map(is_quantised, base.parameters())):
        return False
    if [config.peft_type for config in adapted.peft_config.values()] != [peft.PeftType.LORA]:
        return False
    try:
        quantization_of(_QLORA, torch.float32)
    except AutockptError:
        return False
    layers = list(_to_quantise(base))
    return bool(layers) and not any(layer.weight.requires_grad for layer in layers)


def compute_dtype(step: Step) -> torch.dtype:
    """The type of products with quantised weights: autocast's, else that of the model's weights."""
    base: Any = step.model.get_base_model()  # type: ignore[operator]
    return step.autocast if isinstance(step.autocast, torch.dtype) else base.dtype


def in_four_bits(step: Step) -> Step:
    """The step with its model's base in QLoRA's 4 bits, the same adapters on it, and the same weights trained.

    The model and the optimizer of ``step`` are used up. Raises WorkloadError where PEFT trains other weights on it.
    """
    adapted: Any = step.model
    before = dict(adapted.named_parameters())
    trained = {name: parameter.dtype for name, parameter in before.items() if parameter.requires_grad}
    training, dtype = adapted.training, adapted.get_base_model().dtype
    [(adapter, config)] = adapted.peft_config.items()
    with _disable_current_modes(), quiet():
        from peft import get_peft_model

        quantization = quantization_of(_QLORA, compute_dtype(step))
    base = adapted.unload()
    put_quantised(base, quantization, dtype, torch.device("cpu"), initialised=True)
    with quiet(), warnings.catch_warnings(action="ignore"):  # that it was adapted before
        model = get_peft_model(base, config, adapter).train(training)
    after = dict(model.named_parameters())
    if missing := trained.keys() - after.keys():
        raise WorkloadError(f"{min(missing)} is not there on a base in 4 bits", remedy="Attach adapters yourself.")
    for name, parameter in after.items():
        parameter.requires_grad_(name in trained)
        if name in trained:
            parameter.data = parameter.data.to(trained[name])
    names = {id(parameter): name for name, parameter in before.items() if name in trained}
    optimizer: Any = step.optimizer  # trains their successors, its states are born anew
    for group in optimizer.param_groups:
        group["params"] = [after[names[id(p)]] for p in group["params"] if id(p) in names]
    optimizer.state.clear()
    for parameter in {*before.values()} - {*after.values()}:
        parameter.data = parameter.data.new_empty(0)  # whoever else still holds it
    return replace(step, model=model, settings={})


def _to_quantise(base: Any) -> Iterator[Any]:
    """Linear layers that transformers would quantise."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    spared = HfQuantizer.get_modules_to_not_convert(base, None, base._keep_in_fp32_modules)
    for name, module in base.named_modules():
        linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if linear and ".lora_" not in name and should_convert_module(name.replace(".base_layer", ""), spared):
            yield module
