"""The workload: a model, a batch and everything else that happens between two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.schema.graph import Phase
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.storages import nested_tensors, storage_bytes

Step = Callable[[nn.Module, Any], Tensor]
Mark = Callable[[Phase], None]


@dataclass(eq=False)
class Workload:
    """What is being planned for: one whole accumulation cycle of the user's training.

    ``step(model, batch)`` is forward and loss only; ``full_step()`` replaces the whole cycle for loops that do not fit
    and then ``snapshot`` names the objects with state that it changes. ``batch`` is any nesting of tensors on the
    model's device. ``settings`` are resolved facts for people (parameters, dtype, batch size, ...), ``notes`` what they
    should know about how the workload was made.
    """

    model: nn.Module
    batch: Any
    step: Step
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    full_step: Callable[[], Any] | None = None
    snapshot: tuple[Any, ...] = ()
    spec: WorkloadSpec | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU for a model without either."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            return tensor.device
        return torch.device("cpu")

    def cycle(self, mark: Mark | None = None) -> None:
        """One cycle: ``accumulate`` micro-batches, clipping, optimizer step, gradients released last.

        ``mark`` is called with each phase as it begins ("forward", "backward", "optimizer"); a ``full_step`` is only
        announced as "forward" because its phases are its own business. Raises WorkloadError for a step without a loss.
        """
        if self.full_step is not None:
            _announce(mark, "forward")
            self.full_step()
            return
        for _ in range(self.accumulate):
            self.forward_backward(mark)
        _announce(mark, "optimizer")
        self._update()
        self.release_gradients()

    def forward_backward(self, mark: Mark | None = None) -> Tensor:
        """Forward, loss and backward of one micro-batch; the detached loss. Gradients add up in ``.grad``."""
        _announce(mark, "forward")
        with self._autocast_context():
            loss = _checked(self.step(self.model, self.batch))
        _announce(mark, "backward")
        scaled = loss if self.accumulate == 1 else loss / self.accumulate
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        scaled.backward()
        return loss.detach()

    def release_gradients(self) -> None:
        """Drop every gradient of the model and of the optimizer's parameters."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.model.parameters():
            parameter.grad = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor on the model's device that is alive between two cycles; aliases are not merged."""
        device = self.device
        roots = (self.model, self.optimizer, self.scaler, self.batch, *self.snapshot)
        return (tensor for tensor in nested_tensors(*roots) if tensor.device == device)

    def resident_bytes(self) -> int:
        """Bytes on the model's device between two cycles, each storage once.

        Parameters, buffers, optimizer states (from the first cycle on), scaler, batch and snapshot objects.
        """
        return storage_bytes(self.tensors())

    def _autocast_context(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _update(self) -> None:
        """Unscale, clip and step, in the order that PyTorch's own recipes give."""
        if self.max_grad_norm is not None:
            if self.scaler is not None and self.optimizer is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.optimizer is None:
            return
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _announce(mark: Mark | None, phase: Phase) -> None:
    if mark is not None:
        mark(phase)


def _checked(loss: Any) -> Tensor:
    """The loss, if it is one that backward can start from. Raises WorkloadError otherwise."""
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            f"the step returned {type(loss).__name__}, not a loss tensor",
            remedy="step(model, batch) must return the loss, for instance `return model(**batch).loss`.",
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"the step returned a tensor of shape {tuple(loss.shape)}, not a single loss value",
            remedy="Reduce it in the step, for instance with `.mean()`.",
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "the loss does not depend on any trainable parameter, so there is no backward pass to plan",
            remedy="Check that parameters have requires_grad=True and that the step runs with gradients enabled.",
        )
    return loss
