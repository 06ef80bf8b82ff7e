"""Where rows of logits come from, and the cross-entropy of logits a chunk of rows at a time."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import InPlaceError
from autockpt.policies.compared import laid_out_on, layout_of
from autockpt.policies.fingerprints import fingerprint, form_of
from autockpt.policies.replay import running_again
from autockpt.policies.rerun_state import under, user_modes

if TYPE_CHECKING:
    from autockpt.policies.sentinels import CheckedCall, WatchedTensor

Elementwise = Callable[[Tensor], Tensor]
_SHORT = (torch.bfloat16, torch.float16)


class Rows:
    """One call of a head, of which logits can be had row by row from ``hidden`` (… × features, or the logits).

    ``choice`` is the one in whose name this is done, for messages; ``exact``: gradients must be bit-equal with plain
    training's; ``watch``: where a sentinel compares what is computed again; ``trained``: weights that get gradients
    from here.
    """

    choice: ClassVar[str]
    exact: ClassVar[bool]
    unit: str
    watch: CheckedCall | None
    trained: tuple[nn.Parameter, ...] = ()

    def check(self) -> None:
        """Raise ConflictError where rows cannot be had any more as they were."""

    def running(self) -> AbstractContextManager[None]:
        """Around calls of ``rows``."""
        return nullcontext()

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows."""
        return hidden

    def chunk(self, rows: int) -> int:
        """How many of so many rows make a chunk."""
        raise NotImplementedError

    def whole(self, why: str) -> None:
        """Told when logits are made that the choice was to save."""

    def loss(self, loss: CrossEntropy, hidden: Tensor, target: Tensor) -> Tensor | None:
        """The cross-entropy of rows × features against rows of class indices; None where it is left to PyTorch."""
        raise NotImplementedError


class ChunkState(Attachment):
    """The attachment of an output head that runs again. ``tokens`` are the rows of one chunk."""

    has_sentinel: ClassVar[bool] = True

    def __init__(self, unit: str, tokens: int) -> None:
        super().__init__(unit)
        self.tokens = tokens
        self.warned = False

    def warn(self, why: str) -> None:
        """Say once that the logits exist as a whole after all."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.unit}: chunked_loss computes all logits at once, {why}: they take the memory that the choice "
                "was to save. Results are right.",
                stacklevel=3,
            )


class HeadCall(Rows):
    """What it takes to run a head again on some of the rows it was called with: weights, settings, autocast. ``watch``:
    where a sentinel compares the losses of a chunk's rows with those that forward computed."""

    choice = "chunked_loss"
    exact = False

    def __init__(self, module: nn.Module, state: ChunkState, device: torch.device) -> None:
        self._module, self._state, self.unit = module, state, state.unit
        self._autocast = Autocast(device.type)
        self._parameters = tuple(module.parameters())
        self._versions = [p._version for p in self._parameters]
        self._settings = _settings(module)
        self.watch = state.sentinel.watch(module) if state.sentinel is not None else None
        self.trained = tuple(p for p in self._parameters if p.requires_grad)

    def check(self) -> None:
        """Raise InPlaceError where the weights are no longer what they were, ConflictError where settings are not."""
        now = tuple(self._module.parameters())
        same = len(now) == len(self._parameters) and all(map(operator.is_, now, self._parameters))
        if not same or [p._version for p in self._parameters] != self._versions:
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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around calls of ``rows``: autocast as in the forward. Entered once, so that weights are cast once."""
        self.check()
        with running_again(self.unit), self._autocast.as_before():
            yield

    def rows(self, hidden: Tensor) -> Tensor:
        """Logits of these rows. Inside autocast gradients are enabled: it would remember a copy of the weights that
        was made without them, and hand it to the next user."""
        with torch.set_grad_enabled(torch.is_grad_enabled() or self._autocast.enabled):
            return call_inner(self._module, self._state, (hidden,), {})

    def chunk(self, rows: int) -> int:
        return self._state.tokens

    def whole(self, why: str) -> None:
        self._state.warn(why)

    def loss(self, loss: CrossEntropy, hidden: Tensor, target: Tensor) -> Tensor:
        return _Chunked.apply(loss, hidden, target, *self.trained)  # type: ignore[return-value]


def refuse_twice(call: Rows) -> None:
    """Raise ConflictError in a backward that is itself to be differentiated: that would silently lose a part."""
    if torch.is_grad_enabled():
        raise ConflictError(
            f"the loss of {call.unit} cannot be differentiated twice (create_graph=True) under {call.choice}",
            remedy=f"Use `save` on {call.unit}.",
        )


def refuse_many(call: Rows, gradient: Tensor) -> None:
    """Raise ConflictError in a backward for several gradients at once."""
    if torch._C._functorch.is_legacy_batchedtensor(gradient):  # type: ignore[attr-defined]
        raise ConflictError(
            f"the loss of {call.unit} is differentiated for many gradients at once (is_grads_batched=True), which is "
            f"not possible chunk by chunk, under {call.choice}",
            remedy=f"Take one gradient after the other, or use `save` on {call.unit}.",
        )


class Autocast:
    """The autocast state of one kind of device when this was made, and the user's modes."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.enabled = torch.is_autocast_enabled(kind)
        self._dtype = torch.get_autocast_dtype(kind)
        self._cache = torch.is_autocast_cache_enabled()
        self._modes = user_modes()

    @contextmanager
    def as_before(self) -> Iterator[None]:
        autocast = torch.autocast(self._kind, dtype=self._dtype, enabled=self.enabled, cache_enabled=self._cache)
        with autocast, under(self._modes):
            yield


class MemoryWatch:
    """Notices that a tensor was written to in a way that its version counter does not show. Holds no memory of it.

    Set only once somebody can write so, because it reads the tensor once.
    """

    def __init__(self, tensor: Tensor, *, set_now: bool) -> None:
        self._storage = tensor.untyped_storage()._cdata
        self._layout = layout_of(tensor)
        self._print: Tensor | None = None
        if set_now:
            self._print = fingerprint(tensor, form_of(tensor))

    def set_on(self, other: Tensor) -> None:
        """Set it now, where ``other`` lies in the same memory."""
        if self._print is None and other.untyped_storage()._cdata == self._storage:
            same = laid_out_on(other.untyped_storage(), other.device, self._layout)
            self._print = fingerprint(same, form_of(same))

    def check(self, tensor: Tensor, call: Rows) -> None:
        """Raise InPlaceError where ``tensor``, the one that is watched, is not what it was when this was set."""
        if self._print is not None and not torch.equal(fingerprint(tensor, form_of(tensor)), self._print):
            raise InPlaceError(
                f"the logits of {call.unit} were written to (by .data, NumPy or their storage), and {call.choice} "
                "reads them again later than plain training does",
                remedy=f"Write to a clone of the logits, or use `save` on {call.unit}.",
            )


@dataclass(frozen=True)
class CrossEntropy:
    """``torch.nn.functional.cross_entropy`` of a head's logits after ``steps``, ``chunk`` rows at a time.

    ``passing`` is told when backward comes by; ``watch`` knows whether ``hidden`` was written to since.
    """

    call: Rows
    steps: tuple[Elementwise, ...]
    chunk: int
    reduction: str
    ignore_index: int
    label_smoothing: float
    autocast: Autocast
    passing: Callable[[], None]
    watch: MemoryWatch

    def losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of every row."""
        logits = self.call.rows(hidden)
        for step in self.steps:
            logits = step(logits)
        with self.autocast.as_before():
            return nn.functional.cross_entropy(
                logits, target, ignore_index=self.ignore_index, reduction="none", label_smoothing=self.label_smoothing
            )

    def chunks(self, rows: int) -> list[slice]:
        return [slice(start, min(start + self.chunk, rows)) for start in range(0, rows, self.chunk)]


class _Chunked(torch.autograd.Function):
    """Forward keeps nothing of the logits; backward computes each chunk again (Chen et al. 2016, arXiv:1604.06174)
    and sums the weights' gradients over chunks in single precision at least."""

    @staticmethod
    def forward(ctx: Any, loss: CrossEntropy, hidden: Tensor, target: Tensor, *trained: Tensor) -> Tensor:
        parts, watch = [], loss.call.watch
        ctx.entries = []
        with loss.call.running():
            for rows in loss.chunks(len(hidden)):
                part = loss.losses(hidden[rows].detach(), target[rows]).detach()
                if watch is not None:
                    ctx.entries.append(watch.packed(part))
                    ctx.entries[-1].let_go()
                parts.append(part if loss.reduction == "none" else _wide(part).sum())
        ctx.loss = loss
        count = None
        if loss.reduction == "none":
            result = torch.cat(parts)
        else:
            result = torch.stack(parts).sum()
            if loss.reduction == "mean":
                count = (target != loss.ignore_index).sum()
                result = result / count
            result = result.to(part.dtype)
        ctx.save_for_backward(hidden, target, count)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        loss: CrossEntropy = ctx.loss
        refuse_twice(loss.call)
        refuse_many(loss.call, gradients[0])
        hidden, target, count = ctx.saved_tensors
        gradient = gradients[0] if count is None else gradients[0] / count
        _, wants_hidden, _, *wants = ctx.needs_input_grad
        trained = [p for p, wanted in zip(loss.call.trained, wants, strict=True) if wanted]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        sums: list[Tensor | None] = [None] * len(trained)
        chunks, autocast = loss.chunks(len(hidden)), Autocast(hidden.device.type)
        with loss.call.running():
            for rows, entry in zip_longest(chunks, ctx.entries):
                given = hidden[rows], target[rows], gradient[rows] if gradient.dim() else gradient
                some, found = _of_chunk(loss, *given, trained, of_hidden, entry, autocast)
                if of_hidden is not None and some is not None:
                    of_hidden[rows] = some
                for i, part in enumerate(found):
                    sums[i] = _added(sums[i], part, alone=len(chunks) == 1)
                del some, found
        results = iter(s if s is None else s.to(p.dtype) for s, p in zip(sums, trained, strict=True))
        return None, of_hidden, None, *(next(results) if wanted else None for wanted in wants)


def _of_chunk(
    loss: CrossEntropy,
    hidden: Tensor,
    target: Tensor,
    gradient: Tensor,
    trained: list[nn.Parameter],
    wanted: Tensor | None,
    entry: WatchedTensor | None,
    autocast: Autocast,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Gradients of one chunk: of its rows (where ``wanted``), and of the weights; under backward's own ``autocast``."""
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_(wanted is not None)
        losses = loss.losses(hidden, target)
    if entry is not None:
        entry.handed(losses.detach())
    inputs = [*([hidden] if wanted is not None else []), *trained]
    with autocast.as_before():
        gradient = gradient.to(losses.dtype).expand_as(losses)
        found = list(torch.autograd.grad(losses, inputs, gradient, allow_unused=True))
    return (found.pop(0) if wanted is not None else None), found


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _SHORT else tensor


def _added(total: Tensor | None, part: Tensor | None, *, alone: bool) -> Tensor | None:
    if part is None or alone:
        return part
    return _wide(part) if total is None else total.add_(part)


def _settings(module: nn.Module) -> list[object]:
    """What decides a head's forward beside its weights: active dropout, PEFT's adapters."""
    found: list[object] = []
    for inner in module.modules():
        if isinstance(inner, nn.modules.dropout._DropoutNd):
            found.append(inner.training and inner.p > 0)
        if hasattr(inner, "active_adapters"):
            found.append((list(inner.active_adapters), inner.__dict__.get("_disable_adapters")))  # type: ignore[arg-type]
            found.append(list(getattr(inner, "merged_adapters", ())))
    return found
