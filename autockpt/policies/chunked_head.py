"""Where rows of logits come from, and the cross-entropy of logits a chunk of rows at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autockpt.checkpointing.divergence import CheckedCall
from autockpt.checkpointing.replay_context import AutocastState, running_again
from autockpt.errors import ConflictError, InPlaceError
from autockpt.policies.attachment import Attachment, call_inner

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
Elementwise = Callable[[Tensor], Tensor]
_SHORT = (torch.bfloat16, torch.float16)
_IGNORED = -100
# Rows. GPU kernels choose their way by how a row lies in memory, so chunks begin as whole logits do.
_ALIGNED = 16
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as ATen numbers them


class HeadState(Attachment):
    """The attachment of an output head whose rows are taken in chunks: of ``size`` rows, or so many of them."""

    has_check: ClassVar[bool] = True

    def __init__(self, unit: str, size: int) -> None:
        super().__init__(unit)
        self.size = size

    def warn(self, why: str) -> None:
        """Say once that the logits exist as a whole after all."""
        if not self.warned:
            self.warned = True
            warn_of_whole(self.unit, why)


def warn_of_whole(unit: str, why: str = "because it is part of a graph of torch.compile") -> None:
    """Say that the logits exist as a whole after all."""
    warnings.warn(
        f"{unit}: chunked_loss computes all logits at once, {why}: they take the memory that the choice was to save. "
        "Results are right.",
        stacklevel=3,
    )


# Run while the compiler traces: what torch.compiler.assume_constant_result does, which imports the compiler.
warn_of_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Rows:
    """One call of a head, of which logits can be had row by row from ``hidden``: here of logits that are there already.

    ``choice`` is the one in whose name this is done, for messages; ``exact``: gradients must be bit-equal with plain
    training's; ``trained``: weights that get gradients from here; ``watch``: where a check compares the losses of a
    chunk's rows with those that forward computed.
    """

    choice: ClassVar[str] = "chunked_softmax"
    exact: ClassVar[bool] = True
    trained: tuple[nn.Parameter, ...] = ()

    def __init__(self, state: HeadState) -> None:
        self._state, self.unit = state, state.unit
        observer = state.check.observer() if state.check is not None else None
        self.watch = observer if isinstance(observer, CheckedCall) else None

    def running(self) -> AbstractContextManager[None]:
        """Around calls of ``rows``."""
        return nullcontext()

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows."""
        return hidden

    def chunk(self, rows: int) -> int:
        """How many of so many rows make a chunk."""
        aligned = self._state.size * _ALIGNED
        return -(-rows // aligned) * _ALIGNED

    def whole(self, why: str) -> None:
        """Told when logits are made that the choice was to save."""


class HeadCall(Rows):
    """What it takes to run a head again on some of the rows it was called with: weights, settings, autocast."""

    choice = "chunked_loss"
    exact = False

    def __init__(self, module: nn.Module, state: HeadState, device: torch.device) -> None:
        super().__init__(state)
        self._module = module
        self._casts = AutocastState([device.type])
        self._parameters = tuple(module.parameters())  # alive, so that no other gets their ids
        self._versions = [(id(p), p._version) for p in self._parameters]
        self._settings = _settings(module)
        self.trained = tuple(p for p in self._parameters if p.requires_grad)

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
        with running_again(self.unit), self._casts.restored(remembers=True):
            yield

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows. Inside autocast gradients are enabled: it would remember a copy of the weights that
        was made without them, and hand it to the next user."""
        with torch.set_grad_enabled(torch.is_grad_enabled() or self._casts.enabled):
            return call_inner(self._module, self._state, (hidden,), {})

    def chunk(self, rows: int) -> int:
        return self._state.size

    def whole(self, why: str) -> None:
        self._state.warn(why)


def refuse_odd_backward(call: Rows, gradient: Tensor) -> None:
    """Raise ConflictError in a backward that is itself to be differentiated, which would silently lose a part, and for
    several gradients at once."""
    many = torch._C._functorch.is_legacy_batchedtensor(gradient)  # type: ignore[attr-defined]
    if many or torch.is_grad_enabled():
        how = "for many gradients at once (is_grads_batched=True)" if many else "twice (create_graph=True)"
        raise ConflictError(
            f"the loss of {call.unit} cannot be differentiated {how} under {call.choice}",
            remedy=f"Use `save` on {call.unit}.",
        )


@dataclass(frozen=True)
class CrossEntropy:
    """``torch.nn.functional.cross_entropy`` of a head's logits after ``steps``, a chunk of rows at a time.

    ``options``: what is ignored, and how labels are smoothed. ``passing`` is called when backward comes by.
    """

    call: Rows
    steps: tuple[Elementwise, ...]
    reduction: str
    options: dict[str, Any]
    casts: AutocastState
    passing: Callable[[], None]

    def losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of every row."""
        logits = self.call.rows(hidden)
        for step in self.steps:
            logits = step(logits)
        with self.casts.restored(remembers=True):
            return nn.functional.cross_entropy(logits, target, reduction="none", **self.options)

    def columns(self, target: Tensor) -> Tensor:
        """Targets for a matrix that has, in its one column, what counts of each row."""
        return torch.where(target == self.options["ignore_index"], _IGNORED, 0)

    def chunks(self, rows: int) -> list[slice]:
        chunk = self.call.chunk(rows)
        return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


class ChunkedLoss(torch.autograd.Function):
    """Forward keeps nothing of the logits that it makes; backward computes each chunk again (Chen et al. 2016,
    arXiv:1604.06174) and sums the weights' gradients over chunks in single precision at least. Sums over tokens are
    left to the operator that plain training has, on one number per row."""

    @staticmethod
    def forward(ctx: Any, loss: CrossEntropy, hidden: Tensor, target: Tensor, *trained: Tensor) -> Tensor:
        parts, watch, ctx.entries = [], loss.call.watch, []
        with loss.call.running():
            for rows in loss.chunks(len(hidden)):
                parts.append(loss.losses(hidden[rows].detach(), target[rows]).detach())
                if watch is not None:
                    ctx.entries.append(watch.look_at(len(ctx.entries), parts[-1]))
                    ctx.entries[-1].let_go()
        ctx.loss, ctx.target = loss, target.clone() if ctx.entries else None
        result, total = torch.cat(parts), None
        if loss.reduction != "none":
            column, reduction = -result[:, None], REDUCTIONS[loss.reduction]
            result, total = torch.ops.aten.nll_loss_forward(column, loss.columns(target), None, reduction, _IGNORED)
        # an alias that shares the version counter, so that a change in place is noticed: below autograd views do not
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            ctx.save_for_backward(hidden.detach(), target, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss: CrossEntropy = ctx.loss
        gradient = gradients[0]
        refuse_odd_backward(loss.call, gradient)
        loss.passing()
        hidden, target, total = _saved(ctx, loss)
        if total is not None:
            column, reduction = total.new_empty((len(hidden), 1)), REDUCTIONS[loss.reduction]
            classes = loss.columns(target)
            of_column = torch.ops.aten.nll_loss_backward(gradient, column, classes, None, reduction, _IGNORED, total)
            gradient = -of_column[:, 0]
        _, wants_hidden, _, *wants = ctx.needs_input_grad
        trained = [p for p, wanted in zip(loss.call.trained, wants, strict=True) if wanted]
        of_hidden = hidden if _nobody_else_holds(hidden) else torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(trained)
        chunks, casts = loss.chunks(len(hidden)), AutocastState([hidden.device.type])
        with loss.call.running():
            for rows, entry in zip_longest(chunks, ctx.entries):
                with torch.inference_mode(False), torch.enable_grad():
                    part = hidden[rows].detach().requires_grad_(wants_hidden)
                    losses = loss.losses(part, target[rows])
                if entry is not None:
                    # for the targets of forward: backward is for those of now, which in plain training it reads, too
                    same = loss.losses(part.detach(), ctx.target[rows]) if loss.call.exact else losses.detach()
                    entry.handed(same)
                inputs = [part, *trained] if wants_hidden else trained
                with casts.restored(remembers=True):
                    found = list(gradients_of(losses, inputs, gradient[rows]))
                if wants_hidden and found[0] is not None:
                    of_hidden[rows] = found[0]
                pairs = zip(sums, found[1:] if wants_hidden else found, strict=True)
                sums = [_added(total, more, alone=len(chunks) == 1) for total, more in pairs]
                del losses, found, pairs  # before the next chunk's are made
        results = iter(s if s is None else s.to(p.dtype) for s, p in zip(sums, trained, strict=True))
        return None, of_hidden if wants_hidden else None, None, *(next(results) if w else None for w in wants)


def gradients_of(output: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Those of inputs that autograd, whose backward this is part of, is handed next: it runs their hooks then."""
    kept = [(hooks, hooks.copy()) for tensor in inputs if (hooks := tensor._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        return torch.autograd.grad(output, inputs, gradient, allow_unused=True)
    finally:
        for hooks, those in kept:
            hooks.update(those)


def _saved(ctx: Any, loss: CrossEntropy) -> tuple[Tensor, ...]:
    """What backward was given. Raises InPlaceError where it was changed in place since."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        what = "logits" if loss.call.exact else "features"
        raise InPlaceError(
            f"the {what} of {loss.call.unit} (or their targets) have been modified by an inplace operation since the "
            f"loss, and {loss.call.choice} reads them again in backward",
            remedy=f"Change a clone of them, or use `save` on {loss.call.unit}.",
        ) from error


def _nobody_else_holds(saved: Tensor) -> bool:
    """Whether memory may be written over: no other tensor is on it, and this backward is the graph's last."""
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    holders, one = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (saved, torch.empty(0)))
    return not kept and holders == one


def _added(total: Tensor | None, part: Tensor | None, *, alone: bool) -> Tensor | None:
    if part is None or alone:
        return part
    if total is None:
        return part.float() if part.dtype in _SHORT else part
    return total.add_(part)


def _settings(module: nn.Module) -> list[object]:
    """What decides a head's forward beside its weights: active dropout, PEFT's adapters."""
    found: list[object] = []
    for inner in module.modules():
        found.append(drops_out(inner))
        if hasattr(inner, "active_adapters"):
            found.append((list(inner.active_adapters), inner.__dict__.get("_disable_adapters")))  # type: ignore[arg-type]
            found.append(list(getattr(inner, "merged_adapters", ())))
    return found


def drops_out(module: nn.Module) -> bool:
    """Whether it is a dropout that acts."""
    return isinstance(module, _DROPOUTS) and module.training and module.p > 0
