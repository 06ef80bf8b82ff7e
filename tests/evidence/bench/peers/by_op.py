"""Sets of ops whose outputs a recomputed layer keeps, by PyTorch's selective activation checkpointing."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from tests.evidence.bench.peers.base import Context, Detach, Peer, Setting, recomputed_but, replace_forwards

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward")

KEEP = {
    "matmuls and attention": {"attention": True, "matmuls": 1},
    "every second matmul and attention": {"attention": True, "matmuls": 2},
    "attention": {"attention": True, "matmuls": 0},
}


class OpSets(Peer):
    """Each layer is recomputed but for the outputs of some ops.

    "every second matmul" is torchtitan's selective option (torchtitan/distributed/activation_checkpoint.py): matrix
    products are counted through a layer's forward, and those with odd numbers are kept.
    """

    name = "keep ops"

    def settings(self, context: Context) -> Iterable[Setting]:
        for label, kept in KEEP.items():
            yield Setting(label, dict(kept))

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        keeping = recomputed_but(lambda: policy(setting["attention"], setting["matmuls"]))
        return replace_forwards(model, dict.fromkeys(units, keeping))


def policy(attention: bool, matmuls: int) -> Callable[..., CheckpointPolicy]:
    """A policy for one call of a layer. ``matmuls``: 0 none, n the first of every n."""
    seen: Counter[bool] = Counter()  # by whether the layer runs again: its second run counts again

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = kind_of(op)
        if kind == "matmul" and matmuls:
            seen[context.is_recompute] += 1
            kept = (seen[context.is_recompute] - 1) % matmuls == 0
        else:
            kept = kind == "attention" and attention
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def kind_of(op: Any) -> str:
    """ "matmul", "attention" or "" for an op overload."""
    name = op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else str(op)
    if name in _MATMULS:
        return "matmul"
    return "attention" if name.startswith(_ATTENTION) or "flex_attention" in name else ""
