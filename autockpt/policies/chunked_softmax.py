"""chunked_softmax: of a language model's head the logits are kept, and softmax and loss run over chunks of tokens.

Plain cross-entropy keeps log-probabilities of all tokens (in fp32 beside 16-bit logits), and in backward their gradient
and that of the logits exist at once. Rows do not depend on each other, so these are made chunk by chunk here, from the
logits, bit for bit as they were. The head itself runs as ever. (Rows at a time, backward in place: as fused
cross-entropy kernels do, e.g. of flash-attention; here with PyTorch's own operators, whose bits are plain training's.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from autockpt.policies.attachment import Attachment, acts, call_inner
from autockpt.policies.base import InPlaceError, PlannedUnit, PolicySession
from autockpt.policies.chunked_loss import refuse_others
from autockpt.policies.headcall import CrossEntropy, Rows, refuse_many, refuse_twice
from autockpt.policies.lazylogits import lazy_logits
from autockpt.policies.saved_outputs import alias
from autockpt.schema.choices import Choice

if TYPE_CHECKING:
    from autockpt.policies.sentinels import CheckedCall

# Rows. GPU kernels choose their way by how a row lies in memory, so chunks begin as whole logits do.
_ALIGNED = 16
_IGNORED = -100
_REDUCTIONS = {"mean": 1, "sum": 2}  # of ATen


class ChunkedSoftmaxPolicy:
    kind: ClassVar[str] = "chunked_softmax"

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        for unit in units:
            refuse_others(unit)
            chunks = unit.choice.chunks  # type: ignore[union-attr]
            session.place(unit.name, unit.module, run_softmax, _SoftmaxState(unit.name, chunks))
            session.note(unit.name, f"chunked_softmax: in {chunks} parts, again in backward")

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        return 0, 0


class _SoftmaxState(Attachment):
    """The attachment of an output head; tokens are taken in so many ``chunks``."""

    has_sentinel: ClassVar[bool] = True

    def __init__(self, unit: str, chunks: int) -> None:
        super().__init__(unit)
        self.chunks = chunks


def run_softmax(module: nn.Module, state: _SoftmaxState, /, *args: Any, **kwargs: Any) -> Any:
    """The head's forward, and its logits such that cross-entropy of them runs over chunks.

    Without gradients, and inside ``torch.compile``, the plain forward.
    """
    logits = call_inner(module, state, args, kwargs)
    if torch.compiler.is_compiling() or not acts(state):
        return logits
    if module._backward_hooks or module._backward_pre_hooks:  # they ask for the gradient of the logits
        return logits
    if type(logits) is not Tensor or not logits.requires_grad or logits.dim() < 2 or not logits.is_floating_point():
        return logits
    watch = state.sentinel.watch(module) if state.sentinel is not None else None
    return lazy_logits(_Given(state, watch), logits, logits)


class _Given(Rows):
    """Rows of logits that are there already. ``watch``: where a sentinel compares the losses of rows, which backward
    computes again, with those that forward computed."""

    choice = "chunked_softmax"
    exact = True

    def __init__(self, state: _SoftmaxState, watch: CheckedCall | None) -> None:
        self.unit, self._chunks, self.watch = state.unit, state.chunks, watch

    def chunk(self, rows: int) -> int:
        aligned = self._chunks * _ALIGNED
        return -(-rows // aligned) * _ALIGNED

    def loss(self, loss: CrossEntropy, hidden: Tensor, target: Tensor) -> Tensor | None:
        if loss.label_smoothing:  # of two sums over all tokens, which chunks would take in another order
            return None
        return _ByRows.apply(loss, hidden, target)  # type: ignore[return-value]


class _ByRows(torch.autograd.Function):
    """Sums over tokens are left to the operator that plain training has, on one number per row."""

    @staticmethod
    def forward(ctx: Any, loss: CrossEntropy, logits: Tensor, target: Tensor) -> Tensor:
        parts = [loss.losses(logits[rows], target[rows]) for rows in loss.chunks(len(logits))]
        ctx.entries = [] if loss.call.watch is None else [loss.call.watch.packed(part) for part in parts]
        ctx.target = target.clone() if ctx.entries else None
        for entry in ctx.entries:
            entry.let_go()
        result = torch.cat(parts)
        total = None
        if loss.reduction != "none":
            column, classes = -result[:, None], _columns(loss, target)
            reduction = _REDUCTIONS[loss.reduction]
            result, total = torch.ops.aten.nll_loss_forward(column, classes, None, reduction, _IGNORED)
        ctx.loss = loss
        ctx.save_for_backward(alias(logits), target, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss: CrossEntropy = ctx.loss
        refuse_twice(loss.call)
        refuse_many(loss.call, gradients[0])
        loss.passing()
        logits, target, total = _saved(ctx, loss)
        loss.watch.check(logits, loss.call)
        gradient = gradients[0]
        if total is not None:
            column, classes = total.new_empty((len(logits), 1)), _columns(loss, target)
            reduction = _REDUCTIONS[loss.reduction]
            of_column = torch.ops.aten.nll_loss_backward(gradient, column, classes, None, reduction, _IGNORED, total)
            gradient = -of_column[:, 0]
        found = logits if _nobody_else_holds(logits) else torch.empty_like(logits)
        for rows, entry in zip_longest(loss.chunks(len(logits)), ctx.entries):
            with torch.enable_grad():
                part = logits[rows].detach().requires_grad_()
                losses = loss.losses(part, target[rows])
            if entry is not None:
                # for the targets of forward: backward is for those of now, which in plain training it reads, too
                entry.handed(loss.losses(part.detach(), ctx.target[rows]))
            found[rows] = torch.autograd.grad(losses, part, gradient[rows])[0]
        return None, found, None


def _saved(ctx: Any, loss: CrossEntropy) -> tuple[Tensor, ...]:
    """What backward was given. Raises InPlaceError where it was changed in place since."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise InPlaceError(
            f"the logits of {loss.call.unit} (or their targets) have been modified by an inplace operation since the "
            f"loss, and {loss.call.choice} reads them again in backward",
            remedy=f"Change a clone of them, or use `save` on {loss.call.unit}.",
        ) from error


def _columns(loss: CrossEntropy, target: Tensor) -> Tensor:
    """Targets for a matrix that has, in its one column, what counts of each row."""
    return torch.where(target == loss.ignore_index, _IGNORED, 0)


def _nobody_else_holds(saved: Tensor) -> bool:
    """Whether memory may be written over: no other tensor is on it, and this backward is the graph's last."""
    if torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
        return False
    return _holders(saved) == _holders(torch.empty(0))


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
