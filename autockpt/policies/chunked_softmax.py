"""chunked_softmax: of a language model's head the logits are kept, and softmax and loss run over chunks of tokens.

Plain cross-entropy keeps log-probabilities of all tokens (in fp32 beside 16-bit logits), and in backward their gradient
and that of the logits exist at once. Rows do not depend on each other, so these are made chunk by chunk here, from the
logits, bit for bit as they were. The head itself runs as ever. (Rows at a time, backward in place: as fused
cross-entropy kernels do, e.g. of flash-attention; here with PyTorch's own operators, whose bits are plain training's.)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autockpt.policies.attachment import call_inner, is_enabled
from autockpt.policies.base import PlannedUnit, Policy, PolicySession
from autockpt.policies.chunked_head import HeadState, Rows
from autockpt.policies.chunked_loss import refuse_others
from autockpt.policies.lazy_logits import lazy_logits


class ChunkedSoftmaxPolicy(Policy):
    kind: ClassVar[str] = "chunked_softmax"

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        refuse_others(unit)
        chunks = unit.choice.chunks  # type: ignore[union-attr]
        session.place(unit.name, unit.module, run_softmax, HeadState(unit.name, chunks))
        return f"chunked_softmax: in {chunks} parts, again in backward"


def run_softmax(module: nn.Module, state: HeadState, /, *args: Any, **kwargs: Any) -> Any:
    """The head's forward, and its logits such that cross-entropy of them runs over chunks.

    Without gradients, and inside ``torch.compile``, the plain forward.
    """
    logits = call_inner(module, state, args, kwargs)
    if torch.compiler.is_compiling() or not is_enabled(state):
        return logits
    if module._backward_hooks or module._backward_pre_hooks:  # they ask for the gradient of the logits
        return logits
    if type(logits) is not Tensor or not logits.requires_grad or logits.dim() < 2 or not logits.is_floating_point():
        return logits
    return lazy_logits(Rows(state), logits, logits)
