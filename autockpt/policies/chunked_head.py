"""chunked_loss, chunked_softmax: a language model's cross-entropy runs over chunks of tokens, each again in backward.

chunked_loss runs the output head as well: logits, their fp32 copy and their gradients exist for one chunk at a time.
The idea is that of Liger Kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989) and of Cut
Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009), here with PyTorch's own operators.

chunked_softmax keeps the logits. Plain cross-entropy keeps log-probabilities of all tokens (in fp32 for 16-bit
logits), and in backward their gradient and that of the logits exist at once. Rows do not depend on each other, so these
are made chunk by chunk from the logits, bit for bit as they were (rows at a time, backward in place: as fused
cross-entropy kernels do, e.g. of flash-attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from autockpt.checkpointing.replay_context import AutocastState, running_again
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner, is_enabled, is_library, warn
from autockpt.policies.lazy_logits import LazyLogits, Rows, lazy_logits


def attach_chunked_loss(unit: PlannedUnit, session: Session) -> None:
    refuse_others(unit)
    _refuse_parts(unit.module, unit.name)
    session.place(unit.module, run_chunked, HeadState(unit.name, unit.choice.tokens))  # type: ignore[union-attr]


_WHOLE = (
    "{unit}: chunked_loss computes all logits at once, {why}: they take the memory that the choice was to save. "
    "Results are right."
)


class HeadState(Attachment):
    """The attachment of an output head whose rows are taken in chunks: of ``size`` rows, or so many of them."""

    has_check: ClassVar[bool] = True

    def __init__(self, unit: str, size: int) -> None:
        super().__init__(unit)
        self.size = size

    def warn(self, why: str) -> None:
        """Say once that the logits exist as a whole after all."""
        self.warn_once(_WHOLE.format(unit=self.unit, why=why))


class HeadCall(Rows):
    """What it takes to run a head again on some of the rows it was called with: weights, settings, autocast."""

    choice = "chunked_loss"
    exact = False

    def __init__(self, module: nn.Module, state: HeadState, device: torch.device) -> None:
        super().__init__(state.unit, state.size, state.check)
        self._module, self._state = module, state
        self._casts = AutocastState([device.type])
        self._parameters = tuple(module.parameters())  # alive, so that no other gets their ids
        self._versions = [(id(p), p._version) for p in self._parameters]
        self._settings = _settings(module)
        self.trained = tuple(p for p in self._parameters if p.requires_grad)
        self.warn = state.warn

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around calls of ``rows``: autocast as in the forward. Entered once, so that weights are cast once.

        Raises InPlaceError where the weights are no longer what they were, ConflictError where settings are not.
        """
        if [(id(p), p._version) for p in self._module.parameters()] != self._versions:
            raise InPlaceError(
                f"weights of {self.unit} have been modified by an inplace operation (or exchanged) since its forward, "
                "and its logits are only computed when they are needed",
                remedy="Read the logits and run backward before the optimizer steps, and inside the model's forward "
                "where FSDP gathers the weights only there.",
            )
        if _settings(self._module) != self._settings:
            raise ConflictError(
                f"dropout or adapters of {self.unit} were switched between its forward and the use of its logits",
                remedy=f"Use `save` on {self.unit}, or switch after backward.",
            )
        with running_again(self.unit), self._casts.restored():
            yield

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows. Inside autocast gradients are enabled: it would remember a copy of the weights that
        was made without them, and hand it to the next user."""
        with torch.set_grad_enabled(torch.is_grad_enabled() or self._casts.enabled):
            return call_inner(self._module, self._state, (hidden,), {})

    def chunk(self, rows: int) -> int:
        return self._size


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ADAPTERS = ("active_adapters", "_disable_adapters", "merged_adapters")


def _settings(module: nn.Module) -> list[object]:
    """What decides a head's forward besides its weights: active dropout, PEFT's adapters."""
    return [(drops_out(m), *(repr(getattr(m, name, None)) for name in _ADAPTERS)) for m in module.modules()]


def drops_out(module: nn.Module) -> bool:
    """Whether it is a dropout that acts."""
    return isinstance(module, _DROPOUTS) and module.training and module.p > 0


def run_chunked(module: nn.Module, state: HeadState, /, *args: Any, **kwargs: Any) -> Any:
    """The head's forward: logits that are computed when they are needed. Without gradients, and inside
    ``torch.compile`` (which is said once), the plain forward.

    Raises ConflictError where the weights are not whole here (FSDP on the head itself, tensor parallelism, ZeRO-3).
    """
    if not is_enabled(state):
        return call_inner(module, state, args, kwargs)
    if torch.compiler.is_compiling():
        warn(_WHOLE.format(unit=state.unit, why="because it is part of a graph of torch.compile"))
        return call_inner(module, state, args, kwargs)
    _refuse_parts(module, state.unit, running=True)
    if not goes_row_by_row(module, args, kwargs):
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
    parameters = list(module.parameters())
    fsdp2 = any(hasattr(inner, "set_reshard_after_backward") for inner in module.modules())
    in_parts = any(hasattr(p, "ds_id") or (running and hasattr(p, "to_local")) for p in parameters)
    if fsdp2 or in_parts or not parameters:
        raise ConflictError(
            f"chunked_loss cannot be used on {name}: its weights are not whole after its forward, where the loss is "
            "computed",
            remedy=f"Use `save` on {name}; or call FSDP2's fully_shard on the blocks and the whole model only, so that "
            "the head's weights are gathered with the model's.",
        )


def goes_row_by_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether calls for some of the rows give what this call gives: dropout would draw other numbers, hooks run for
    every part or ask for the gradient of the whole output, and a mode of the user's may count calls."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(x, Tensor) or isinstance(x, LazyLogits) or x.dim() < 2 or not x.numel():
        return False
    return all(is_library(type(mode)) for mode in _get_current_function_mode_stack()) and not any(
        drops_out(inner)
        or inner._backward_hooks
        or inner._backward_pre_hooks
        or (inner is not module and (inner._forward_hooks or inner._forward_pre_hooks))
        for inner in module.modules()
    )


def plain_head(module: nn.Module) -> nn.Module:
    """The layer inside PEFT's wrappers around an output head."""
    inside = (module._modules.get(name) for name in ("base_layer", "original_module", "token_adapter"))
    inner = next(filter(None, inside), None)
    return module if inner is None else plain_head(inner)


def attach_chunked_softmax(unit: PlannedUnit, session: Session) -> None:
    refuse_others(unit)
    session.place(unit.module, run_softmax, HeadState(unit.name, unit.choice.chunks))  # type: ignore[union-attr]


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
    return lazy_logits(Rows(state.unit, state.size, state.check), logits, logits)
