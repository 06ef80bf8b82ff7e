"""chunked_loss: a language model's output head and its cross-entropy run over chunks of tokens.

Logits, their fp32 copy and their gradients exist for one chunk at a time; each chunk is computed again in backward. The
idea is that of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989) and of Cut Cross-Entropy
(Wijmans et al. 2024, arXiv:2411.09009), here with PyTorch's own operators.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from autockpt.errors import ConflictError
from autockpt.policies.attachment import call_inner, is_enabled
from autockpt.policies.base import PlannedUnit, Policy, PolicySession, is_library
from autockpt.policies.chunked_head import HeadCall, HeadState, drops_out, warn_of_whole
from autockpt.policies.lazy_logits import LazyLogits, lazy_logits
from autockpt.schema.choices import Choice


class ChunkedLossPolicy(Policy):
    kind: ClassVar[str] = "chunked_loss"

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        refuse_others(unit)
        _refuse_parts(unit.module, unit.name)
        tokens = unit.choice.tokens  # type: ignore[union-attr]
        session.place(unit.name, unit.module, run_chunked, HeadState(unit.name, tokens))
        how = "again in backward; gradients are equal up to rounding"
        return f"chunked_loss: logits and loss of {tokens} tokens at a time, {how}"

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        # once with no rows to learn type and size, then each chunk; each chunk again
        return (max(1, forward // 2), forward - 1) if forward else (0, 0)


def run_chunked(module: nn.Module, state: HeadState, /, *args: Any, **kwargs: Any) -> Any:
    """The head's forward: logits that are computed when they are needed. Without gradients, and inside
    ``torch.compile`` (which is said once), the plain forward.

    Raises ConflictError where the weights are not whole here (FSDP on the head itself, tensor parallelism, ZeRO-3).
    """
    if not is_enabled(state):
        return call_inner(module, state, args, kwargs)
    if torch.compiler.is_compiling():
        warn_of_whole(state.unit)
        return call_inner(module, state, args, kwargs)
    _refuse_parts(module, state.unit, running=True)
    if not _suits(module, args, kwargs):
        state.warn("because dropout, hooks, a TorchFunctionMode or the arguments of the head do not go chunk by chunk")
        return call_inner(module, state, args, kwargs)
    hidden: Tensor = args[0]
    call = HeadCall(module, state, hidden.device)
    if not (call.trained or hidden.requires_grad):
        return call_inner(module, state, args, kwargs)
    with call.running():
        none = call.rows(hidden.detach()[:0])
    if type(none) is not Tensor or none.shape[:-1] != (0, *hidden.shape[1:-1]):
        state.warn("because the head does not give one row of logits per token")
        return call_inner(module, state, args, kwargs)
    return lazy_logits(call, hidden, none)


def refuse_others(unit: PlannedUnit) -> None:
    """Raise ConflictError for a unit that is no output head."""
    if not isinstance(plain_head(unit.module), nn.Linear):
        raise ConflictError(
            f"{unit.choice.kind} is for the output head, and {unit.name} is a {type(unit.module).__name__}",
            remedy="Write it for the model's lm_head (a Linear), and other choices for its blocks.",
        )


def _refuse_parts(module: nn.Module, name: str, *, running: bool = False) -> None:
    """Raise ConflictError where the weights are not whole outside of the head's own forward; ``running``: in it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    parameters = list(module.parameters())
    own = any(fsdp is not None and isinstance(inner, fsdp.FSDPModule) for inner in module.modules())
    if own or any(hasattr(p, "ds_id") for p in parameters):
        why = "is sharded by itself"
    elif not parameters or (running and any(hasattr(p, "to_local") for p in parameters)):
        why = "does not hold whole weights"
    else:
        return
    raise ConflictError(
        f"chunked_loss cannot be used on {name}, which {why}: its loss is computed after its own forward",
        remedy=f"Use `save` on {name}; or call FSDP2's fully_shard on the blocks and the whole model only, so that the "
        "head's weights are gathered with the model's.",
    )


def _suits(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether chunks of the rows give what the whole call gives: dropout would draw other numbers, hooks run for every
    chunk or ask for the gradient of the logits, and a mode of the user's may count calls."""
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or isinstance(args[0], LazyLogits):
        return False
    if args[0].dim() < 2 or not args[0].numel():
        return False
    return all(is_library(type(mode)) for mode in _get_current_function_mode_stack()) and not any(
        drops_out(inner)
        or inner._backward_hooks
        or inner._backward_pre_hooks
        or (inner is not module and (inner._forward_hooks or inner._forward_pre_hooks))
        for inner in module.modules()
    )


def plain_head(module: nn.Module) -> nn.Module | None:
    """The layer inside PEFT's wrappers around an output head."""
    for _ in range(4):
        inside = (module._modules.get(name) for name in ("base_layer", "original_module", "token_adapter"))
        inner = next(filter(None, inside), None)
        if inner is None:
            return module
        module = inner
    return None
