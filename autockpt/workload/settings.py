"""Resolved facts about a workload, for people to read beside every answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.workload.core import Workload
from autockpt.workload.losses import inner_model
from autockpt.workload.storages import nested_tensors

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def describe(workload: Workload, **more: Any) -> dict[str, Any]:
    """What is being trained, and how; ``more`` adds or replaces entries. Values are JSON-able, None where unknown.

    ``tokens`` counts the positions of one whole cycle, padding included; None where the batch holds no token ids.
    """
    model = workload.model
    parameters = list(model.parameters())
    config = getattr(inner_model(model), "config", None)
    rows, length = _batch_size(workload.batch)
    facts = {
        "model": type(inner_model(model)).__name__,
        "params": sum(_numbers(p) for p in parameters),
        "trainable_params": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": _dtype(parameters),
        "autocast": None if workload.autocast is None else short_dtype(workload.autocast),
        "batch_size": rows,
        "seq_len": length,
        "tokens": None if rows is None or length is None else rows * length * workload.accumulate,
        "accumulate": workload.accumulate,
        "optimizer": "full_step" if workload.full_step else _optimizer(workload.optimizer),
        "scaler": workload.scaler is not None,
        "max_grad_norm": workload.max_grad_norm,
        "attention": getattr(config, "_attn_implementation", None),
        "device": str(workload.device),
    }
    return facts | more


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16`` for torch.bfloat16, and PyTorch's own name for unusual ones."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _numbers(parameter: nn.Parameter) -> int:
    """Elements of a weight; bitsandbytes packs two of 4 bits into a byte, and keeps the shape beside them."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return parameter.numel() if shape is None else math.prod(shape)


def _dtype(parameters: Iterable[nn.Parameter]) -> str | None:
    """The type that most of the numbers in the weights have, of those that are not quantised."""
    counts: dict[torch.dtype, int] = {}
    for p in (p for p in parameters if p.is_floating_point()):
        counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return short_dtype(max(counts, key=lambda d: counts[d])) if counts else None


def _optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    return "none" if optimizer is None else type(optimizer).__name__


def _batch_size(batch: Any) -> tuple[int | None, int | None]:
    """(rows, sequence length): from the token ids where there are any, else rows from the first tensor."""
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if isinstance(ids, Tensor) and ids.dim() == 2:
        return ids.shape[0], ids.shape[1]
    first = next((t for t in nested_tensors(batch) if t.dim()), None)
    return (None if first is None else first.shape[0]), None
