"""transformers models from configurations, with random or trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.configs import ConfigSource, hub_reachable
from autockpt.workload.failures import is_out_of_memory, summary
from autockpt.workload.fastinit import fast_init
from autockpt.workload.heads import Head
from autockpt.workload.quantised import build_quantised, quantization_of
from autockpt.workload.step import DTYPES


def make_model(
    spec: WorkloadSpec, source: ConfigSource, head: Head, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The model on ``device`` in training mode; its weights random, or trained where the spec says so.

    Raises WorkloadError for an attention implementation that is not there, weights that cannot be had, and whatever
    else transformers refuses; running out of memory is passed on.
    """
    options: dict[str, Any] = {"dtype": dtype}
    products = DTYPES[spec.autocast] if spec.autocast is not None else dtype
    quantization = quantization_of(spec, products)
    if spec.attn is not None:
        options["attn_implementation"] = spec.attn
    try:
        model = (
            _trained(spec, source, head, options, quantization, device)
            if spec.weights
            else _random(spec, source, head, options, quantization, device)
        )
    except WorkloadError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _explain(error, spec, source) from None
    return model.train()


def _random(
    spec: WorkloadSpec,
    source: ConfigSource,
    head: Head,
    options: dict[str, Any],
    quantization: Any,
    device: torch.device,
) -> nn.Module:
    if quantization is not None:
        if head.remote:
            raise WorkloadError(
                f"{source.where} is built by code of its own, which is not quantised without its weights",
                remedy="Add --weights, or make the model in a function of your own.",
            )
        return build_quantised(model_class(head), source.config, options, quantization, device)
    with torch.device(device), fast_init():
        if head.remote:
            auto = model_class(head)
            return auto.from_config(source.config, trust_remote_code=spec.trust_remote_code, **options)
        return model_class(head)._from_config(source.config, **options)


def model_class(head: Head) -> Any:
    """transformers' class that makes models of this head. Imports the module that it is in."""
    import transformers

    return getattr(transformers, head.auto if head.remote else head.cls)


def _trained(
    spec: WorkloadSpec,
    source: ConfigSource,
    head: Head,
    options: dict[str, Any],
    quantization: Any,
    device: torch.device,
) -> nn.Module:
    if source.pretrained is None:
        raise WorkloadError(
            f"there are no trained weights for {source.where}",
            remedy="Leave --weights out, or give a hub id or a directory with weights.",
        )
    remote = {"trust_remote_code": spec.trust_remote_code} if head.remote else {}
    local = Path(source.pretrained).is_dir() or not hub_reachable()
    if quantization is not None and getattr(source.config, "quantization_config", None) is None:
        options = options | {"quantization_config": quantization}
    if quantization is not None:
        options = options | {"device_map": {"": device}}
    model = model_class(head).from_pretrained(
        source.pretrained, config=source.config, local_files_only=local, **options, **remote
    )
    return model if quantization is not None else model.to(device)


def _explain(error: Exception, spec: WorkloadSpec, source: ConfigSource) -> WorkloadError:
    text = str(error)
    if spec.attn is not None and any(w in text for w in ("attn_implementation", "attention implementation", spec.attn)):
        return WorkloadError(
            f"{source.where} cannot use the attention {spec.attn!r} here: {summary(error)}",
            remedy="Use --attn sdpa or --attn eager, or install what it needs.",
        )
    if isinstance(error, ImportError):
        return WorkloadError(
            f"{source.where} needs a package that is missing: {summary(error)}", remedy="Install it with pip."
        )
    if spec.weights and isinstance(error, OSError):
        offline = not (Path(str(source.pretrained)).is_dir() or hub_reachable())
        reason = "not in the local cache, and the hub cannot be reached" if offline else summary(error)
        return WorkloadError(
            f"the weights of {source.where} could not be had: {reason}",
            remedy="Leave --weights out: bytes and seconds do not depend on them.",
        )
    return WorkloadError(
        f"transformers cannot build {source.where}: {summary(error)}",
        remedy="Correct the configuration, or write a function that returns (model, batch).",
    )
