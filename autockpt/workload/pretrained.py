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
    quantization = quantization_of(spec, DTYPES[spec.autocast] if spec.autocast is not None else dtype)
    if spec.weights and source.pretrained is None:
        raise WorkloadError(
            f"there are no trained weights for {source.where}",
            remedy="Leave --weights out, or give a hub id or a directory with weights.",
        )
    if head.remote and quantization is not None and not spec.weights:
        raise WorkloadError(
            f"{source.where} is built by code of its own, which is not quantised without its weights",
            remedy="Add --weights, or make the model in a function of your own.",
        )
    try:
        return _made(spec, source, head, dtype, quantization, device).train()
    except Exception as error:
        if isinstance(error, WorkloadError) or is_out_of_memory(error):
            raise
        raise _explain(error, spec, source) from None


def _made(
    spec: WorkloadSpec, source: ConfigSource, head: Head, dtype: torch.dtype, quantization: Any, device: torch.device
) -> nn.Module:
    cls, config = model_class(head), source.config
    options: dict[str, Any] = {"dtype": dtype} | ({} if spec.attn is None else {"attn_implementation": spec.attn})
    code = {"trust_remote_code": spec.trust_remote_code} if head.remote else {}
    if not spec.weights and quantization is not None:
        return build_quantised(cls, config, options, quantization, device)
    if not spec.weights:
        with torch.device(device), fast_init():
            return (cls.from_config if head.remote else cls._from_config)(config, **options, **code)
    if quantization is not None:
        options["device_map"] = {"": device}
        if getattr(config, "quantization_config", None) is None:
            options["quantization_config"] = quantization
    local = Path(str(source.pretrained)).is_dir() or not hub_reachable()
    model = cls.from_pretrained(source.pretrained, config=config, local_files_only=local, **options, **code)
    return model if quantization is not None else model.to(device)


def model_class(head: Head) -> Any:
    """transformers' class that makes models of this head. Imports the module that it is in."""
    import transformers

    return getattr(transformers, head.auto if head.remote else head.cls)


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
