"""Quantised base weights: transformers' own bitsandbytes configurations without any weights loaded.

What is built is what ``from_pretrained(…, quantization_config=…)`` builds: bitsandbytes' ``Linear4bit`` (NF4 or FP4) or
``Linear8bitLt`` in place of linear layers, frozen, with packed weights and tables of block maxima; the output head,
embeddings and norms keep their type. Weights are random.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import UsageError
from autockpt.schema.sizes import format_bytes
from autockpt.schema.workload import WorkloadSpec, as_option
from autockpt.workload.configs import ConfigSource
from autockpt.workload.failures import needed, summary
from autockpt.workload.fastinit import fast_init

BITSANDBYTES = ("bitsandbytes", "bits_and_bytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
PACKED = ("Params4bit", "Int8Params")  # bitsandbytes' types of weights


def quantization_of(spec: WorkloadSpec, compute: torch.dtype) -> Any:
    """transformers' ``BitsAndBytesConfig`` for a spec, None where its weights are plain.

    ``load_in_4bit`` is QLoRA's: NF4, double quantisation, products in ``compute``. Raises UsageError for other methods
    than bitsandbytes', a configuration that transformers refuses or that leaves weights whole, and missing packages.
    """
    wanted = dict(spec.quantization or {})
    if spec.load_in_4bit:
        wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        wanted["bnb_4bit_compute_dtype"] = compute
    if not wanted:
        return None
    method = str(wanted.pop("quant_method", BITSANDBYTES[0])).rsplit(".", 1)[-1].lower()
    if method not in BITSANDBYTES:
        raise UsageError(
            f"weights quantised by {method} cannot be planned for: only bitsandbytes' 4 and 8 bits can",
            remedy="Name the model that it was made of, with --load-in-4bit or without; or search the live model: "
            "autockpt.search(autockpt.Step(…)).",
        )
    for name in ("accelerate", "bitsandbytes"):
        with needed(f"quantised weights need the package {name}", "Install it: pip install accelerate bitsandbytes"):
            importlib.import_module(name)
    from transformers import BitsAndBytesConfig

    try:
        config = BitsAndBytesConfig(**{name: value for name, value in wanted.items() if not name.startswith("_")})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`quantization` holds no configuration that transformers takes: {summary(error)}",
            remedy="Write the arguments of BitsAndBytesConfig, or a model's quantization_config.",
        ) from None
    if config.quantization_method() is None or config.llm_int8_has_fp16_weight:
        raise UsageError(
            "`quantization` asks for neither 4 nor 8 bits", remedy="Add load_in_4bit: true or load_in_8bit: true."
        )
    return config


def with_own_quantization(spec: WorkloadSpec, source: ConfigSource) -> WorkloadSpec:
    """The spec with the ``quantization_config`` of a model whose weights are quantised already, as it is.

    Raises UsageError for two wishes at once.
    """
    own = getattr(source.config, "quantization_config", None)
    wishes = {"its own quantization": own} | {
        as_option(name): getattr(spec, name) for name in ("load_in_4bit", "quantization")
    }
    if len(given := [name for name, value in wishes.items() if value]) > 1:
        raise UsageError(
            f"{source.where} can be quantised in one way, not by {' and '.join(given)}", remedy="Leave one of them out."
        )
    return (
        spec
        if own is None
        else spec.model_copy(update={"quantization": own if isinstance(own, dict) else own.to_dict()})
    )


def prepare_for_training(model: nn.Module) -> str:
    """What PEFT's ``prepare_model_for_kbit_training`` does to dtypes, done by itself; a note on it.

    Its other half, activation checkpointing of the model's own, is left off: that is what a plan decides.
    Raises UsageError where PEFT is missing.
    """
    with needed("`prepare_kbit` needs the package peft", "Install it: pip install peft"), _disable_current_modes():
        from peft import prepare_model_for_kbit_training
    half = (torch.float16, torch.bfloat16)
    cast = [p for p in model.parameters() if p.dtype in half and type(p).__name__ not in PACKED]
    nbytes = sum(p.numel() * p.element_size() for p in cast)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False, auto_clear_cache=False)
    return (
        f"As after PEFT's prepare_model_for_kbit_training: {len(cast)} weights (norms, embeddings, head) in fp32, "
        f"{format_bytes(nbytes)} more, and what passes between layers is fp32 unless autocast is on; pass "
        "use_gradient_checkpointing=False to it when you train with a plan"
    )


def quantization_facts(model: nn.Module) -> str | None:
    """``nf4 twice`` (its block maxima quantised, too), ``fp4``, ``int8``; None for a model without such weights."""
    kinds: dict[str, None] = {}
    for weight in filter(is_quantised, model.parameters()):
        settings: Any = weight
        if type(weight).__name__ == "Int8Params":
            kind = "int8"
        else:
            kind = f"{settings.quant_type}{' twice' if settings.compress_statistics else ''}"
        kinds[kind] = None
    return ", ".join(kinds) or None


def build_quantised(
    cls: Any, config: Any, options: Mapping[str, Any], quantization: Any, device: torch.device
) -> nn.Module:
    """A transformers model with quantised random weights on ``device``; whole weights are never all there."""
    from transformers.initialization import meta_device_safe_creation_ops, no_init_weights, no_tie_weights
    from transformers.quantizers.auto import AutoHfQuantizer

    with (
        _disable_current_modes(),  # shapes alone: nothing that a ghost run could see
        torch.device("meta"),
        no_init_weights(),
        no_tie_weights(),
        meta_device_safe_creation_ops(),
    ):
        model = cls._from_config(config, **options)
    with _disable_current_modes(), torch.device("meta"):
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
        quantizer.preprocess_model(model, device_map={"": str(device)})
    with fast_init():
        _materialise(model, options["dtype"], device)
        model.init_weights()
    for module in filter(_has_quantised, model.modules()):
        vars(module.weight).pop("_is_hf_initialized", None)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return model


def _materialise(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give what is on the meta device memory; quantised layers get packed weights, the rest is initialised later."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if packs := _has_quantised(module):
            module.weight = _packed(module, dtype, device)
            # the weight, too: GPT-2 draws some of its weights by name
            vars(module)["_is_hf_initialized"] = vars(module.weight)["_is_hf_initialized"] = True
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                # a bias is loaded in the model's type, whatever transformers makes it in
                tensor = partial(torch.zeros_like, dtype=dtype) if packs else torch.empty_like
                made[id(parameter)] = nn.Parameter(tensor(parameter, device=device), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def is_quantised(weight: Any) -> bool:
    """Whether a weight is of bitsandbytes' types."""
    return type(weight).__name__ in PACKED


def _has_quantised(module: nn.Module) -> bool:
    return is_quantised(getattr(module, "weight", None))


def _packed(layer: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A quantised random weight on the device, for a layer of bitsandbytes' whose weight is on the meta device."""
    template = layer.weight
    drawn = torch.empty(template.shape, dtype=dtype, device=device).normal_(0.0, 0.02)
    settings = {name: value for name, value in vars(template).items() if name not in ("module", "SCB", "CB")}
    # 8 bits are quantised on their way from the CPU, 4 bits on arrival wherever they come from
    source = drawn.to("cpu") if type(template).__name__ == "Int8Params" else drawn
    weight = type(template)(source, requires_grad=False, **settings).to(device)
    if hasattr(weight, "quant_state"):
        weight.module, layer.quant_state = layer, weight.quant_state
    return weight
