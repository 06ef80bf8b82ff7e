"""``Step``: a model, a batch, and everything else that happens between two optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.schema.graph import Phase
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.losses import default_loss, inner_model
from autockpt.workload.stage import StageRun
from autockpt.workload.storages import nested_tensors, storage_bytes

Loss = Callable[[nn.Module, Any], Tensor]
Mark = Callable[[Phase], None]
Report = Callable[[Tensor], None]

_EVAL_MODE = "The model is in eval mode: dropout is off and is not planned for."
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_THE_BATCH = ("batch_size", "seq_len", "tokens", "accumulate")
_SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}


BUCKETS = "buckets"


def ignore(event: Any) -> None:
    """The default for callbacks: do nothing."""


@dataclass(eq=False)
class Step:
    """One optimizer step of the user's training, which is what is planned for: its whole accumulation cycle.

    ``loss(model, batch)`` is the forward pass and returns the loss (default: ``model(**batch).loss``); backward,
    scaler, clipping and ``optimizer`` are run by autockpt, over ``accumulate`` micro-batches. ``autocast`` is a dtype,
    or "bf16" or "fp16". ``full_step()`` replaces the whole cycle for loops that do not fit; ``optimizer`` or
    ``snapshot`` then name the objects with state that it changes. ``batch`` is any nesting of tensors on the model's
    device. ``units`` names the modules that choices are made for, as patterns with commas between them
    (``"encoder.layers.*,mid"``; default: the repeated blocks). Making a Step runs, copies and changes nothing.

    ``in_flight``: the model is one stage of a pipeline, alone, that has so many micro-batches between forward and
    backward. ``loss`` returns a loss in the last stage and the stage's outputs in all others (default: what the model
    returns); tensors of ``batch`` that require gradients come from the stage before. ``return_outputs`` is that of
    ``schedule.step``: the last stage keeps what its model returns until the next step.

    ``settings`` are resolved facts for people (parameters, dtype, batch size, ...), ``notes`` what they should know,
    ``spec`` what the step was built from, if from a spec.

    Raises WorkloadError for what cannot make a training step.
    """

    model: nn.Module
    batch: Any
    _: KW_ONLY
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    autocast: torch.dtype | str | None = None
    full_step: Callable[[], Any] | None = None
    snapshot: tuple[Any, ...] = ()
    units: str | None = None
    in_flight: int | None = None
    return_outputs: bool = True
    spec: WorkloadSpec | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: int = field(default=0, init=False)
    """Micro-batches at the end that a ghost run leaves out, as they are like those before."""

    def __post_init__(self) -> None:
        for message, remedy in _mistakes(self):
            raise WorkloadError(message, remedy=remedy)
        self.autocast, self.snapshot = _dtype(self.autocast), tuple(self.snapshot)
        self.accumulate = max(self.accumulate, self.in_flight or 1)
        if self.loss is None and self.full_step is None:
            self.loss = default_loss(self.model, self.batch, of_stage=self.in_flight is not None)
        self.settings = _facts(self) | self.settings
        if not self.model.training and _EVAL_MODE not in self.notes:
            self.notes = (*self.notes, _EVAL_MODE)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.settings.items() if value is not None)
        return f"<autockpt.Step of {type(self.model).__name__} on {self.device}: {facts}>"

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU for a model without either."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            return tensor.device
        return torch.device("cpu")

    def cycle(self, mark: Mark | None = None, report: Report | None = None) -> None:
        """One cycle: ``accumulate`` micro-batches, clipping, optimizer step, gradients released last.

        ``mark`` is called with each phase as it begins ("forward", "backward", "optimizer"), ``report`` with the loss
        of each micro-batch; a ``full_step`` is only announced as "forward" because its phases and losses are its own
        business. Raises WorkloadError for a step without a loss.
        """
        mark, report = mark or ignore, report or ignore
        if self.full_step is not None:
            mark("forward")
            self.full_step()
            return
        stage = None
        if self.in_flight is not None:
            stage = StageRun(self, mark, report)  # it lives as long as the step
            stage.run(self.accumulate - self.left_out)
        for _ in range(self.accumulate - self.left_out if stage is None else 0):
            report(self.forward_backward(mark))
        mark("optimizer")
        self._update()
        self.release_gradients()

    def forward_backward(self, mark: Mark = ignore) -> Tensor:
        """Forward, loss and backward of one micro-batch; the detached loss. Gradients add up in ``.grad``.

        Of a stage of a pipeline: of as many as are in flight, and one more; all that it computes for other stages.
        """
        if self.in_flight is not None:
            seen: list[Tensor] = []
            StageRun(self, mark, seen.append).run(min(self.accumulate, self.in_flight + 1))
            return torch.cat([tensor.flatten() for tensor in seen])
        mark("forward")
        loss = _checked(self.forward(self.batch))
        mark("backward")
        self.scaled(loss).backward()
        return loss.detach()

    def forward(self, batch: Any) -> Any:
        """What ``loss`` makes of a batch, under ``autocast``."""
        dtype = _dtype(self.autocast)
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype):
            assert self.loss is not None
            return self.loss(self.model, batch)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss of one micro-batch as backward starts from it."""
        scaled = loss if self.accumulate == 1 else loss / self.accumulate
        return scaled if self.scaler is None else self.scaler.scale(scaled)

    def release_gradients(self) -> None:
        """Drop every gradient of the model and of the optimizer's parameters."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.model.parameters():
            parameter.grad = None

    def with_batch(self, batch: Any, accumulate: int | None = None) -> Step:
        """The same step with another batch; ``settings`` that describe the batch are determined again."""
        settings = {name: value for name, value in self.settings.items() if name not in _OF_THE_BATCH}
        return replace(self, batch=batch, accumulate=accumulate or self.accumulate, settings=settings)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor on the model's device that is alive between two cycles; aliases are not merged."""
        device = self.device
        roots = (self.model, self.optimizer, self.scaler, self.batch, *self.snapshot)
        return (tensor for tensor in nested_tensors(*roots) if tensor.device == device)

    def resident_bytes(self) -> int:
        """Bytes on the model's device between two cycles, each storage once.

        Parameters, buffers, optimizer states (from the first cycle on), scaler, batch, snapshot objects, and the
        buckets of DistributedDataParallel where ``settings`` tell of them: no Python object holds these.
        """
        trained = (p for p in self.model.parameters() if p.requires_grad and self.settings.get("ddp") == BUCKETS)
        return storage_bytes(self.tensors()) + sum(p.numel() * p.element_size() for p in trained)

    def _update(self) -> None:
        """Unscale, clip and step, in the order that PyTorch's own recipes give."""
        if self.max_grad_norm is not None:
            if self.scaler is not None and self.optimizer is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.optimizer is not None and self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.optimizer is not None:
            self.optimizer.step()


def _checked(loss: Any) -> Tensor:
    """The loss, if it is one that backward can start from. Raises WorkloadError otherwise."""
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            f"the step returned {type(loss).__name__}, not a loss tensor",
            remedy="loss(model, batch) must return the loss, for instance `return model(**batch).loss`.",
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


def _mistakes(step: Step) -> Iterator[tuple[str, str]]:
    """What cannot make a training step, each with what to do about it."""
    model, optimizer = step.model, step.optimizer
    if not isinstance(model, nn.Module):
        yield f"the model is a {type(model).__name__}", "Pass a torch.nn.Module."
    if step.full_step is not None:
        for name in ("loss", "in_flight"):
            if getattr(step, name) is not None:
                yield f"{name} and full_step were both given", f"full_step replaces the whole cycle: drop {name}."
        if optimizer is None and not step.snapshot:
            yield (
                "full_step was given without naming what else it changes",
                "Name optimizers, schedulers, scalers, ... in snapshot=(...), so that they can be restored.",
            )
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        yield (
            f"the optimizer is {what}, not an optimizer",
            "Pass the optimizer itself, as in torch.optim.AdamW(model.parameters()); schedulers are not part of it. "
            "Several optimizers, or a loop of your own: Step(…, full_step=one_cycle, snapshot=(optimizer, other)).",
        )
    for name, number in (("accumulate", step.accumulate), ("in_flight", step.in_flight)):
        if number is not None and number < 1:
            yield f"{name} is {number!r}", "Pass the number of micro-batches, 1 or more."
    if step.max_grad_norm is not None and not step.max_grad_norm > 0:
        yield f"max_grad_norm is {step.max_grad_norm!r}", "Pass a number above zero, or None."
    if step.autocast is not None and _dtype(step.autocast) not in (torch.bfloat16, torch.float16):
        yield f"autocast is {step.autocast!r}", "Pass torch.bfloat16, torch.float16, or None."
    if step.units is not None and not isinstance(step.units, str):
        yield f"units is {step.units!r}", 'Pass patterns of module names, as in "encoder.layers.*,mid".'
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not trainable:
        yield (
            "no parameter of the model requires gradients, so there is no backward pass to plan",
            "Call model.requires_grad_(True), or attach adapters first.",
        )
    if optimizer is not None and step.full_step is None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held & trainable:
            yield (
                "the optimizer holds no trainable parameter of this model",
                "Create the optimizer from this model's parameters, after wrapping or moving it.",
            )
    for tensor in nested_tensors(step.batch):
        if tensor.device.type != step.device.type:
            yield (
                f"the batch is on {tensor.device} and the model on {step.device}",
                "Move the batch to the model's device first.",
            )


def _dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    return DTYPES.get(autocast) if isinstance(autocast, str) else autocast


def _facts(step: Step) -> dict[str, Any]:
    """What is being trained, and how. Values are JSON-able, None where unknown.

    ``tokens`` counts the positions of one whole cycle, padding included; None where the batch holds no token ids.
    """
    model = step.model
    parameters = list(model.parameters())
    config = getattr(inner_model(model), "config", None)
    rows, length = _batch_size(step.batch)
    optimizer = "none" if step.optimizer is None else type(step.optimizer).__name__
    if step.optimizer is not None and any(group.get("fused") for group in step.optimizer.param_groups):
        optimizer = f"{optimizer} (fused)"
    return {
        "model": type(inner_model(model)).__name__,
        "params": sum(_numbers(p) for p in parameters),
        "trainable_params": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": weights_dtype(parameters),
        "autocast": None if (autocast := _dtype(step.autocast)) is None else short_dtype(autocast),
        "batch_size": rows,
        "seq_len": length,
        "tokens": None if rows is None or length is None else rows * length * step.accumulate,
        "accumulate": step.accumulate,
        "optimizer": "full_step" if step.full_step else optimizer,
        "scaler": step.scaler is not None,
        "max_grad_norm": step.max_grad_norm,
        "attention": getattr(config, "_attn_implementation", None),
        "device": str(step.device),
    } | {name: known for name, known in (("ddp", ddp_of(model)), ("in_flight", step.in_flight)) if known is not None}


def ddp_of(model: Any) -> str | None:
    """``buckets`` where DistributedDataParallel copies gradients into buckets that it keeps; None elsewhere."""
    copies = isinstance(model, nn.parallel.DistributedDataParallel) and not model.gradient_as_bucket_view
    return BUCKETS if copies else None


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16`` for torch.bfloat16, and PyTorch's own name for unusual ones."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _numbers(parameter: nn.Parameter) -> int:
    """Elements of a weight; bitsandbytes packs two of 4 bits into a byte, and keeps the shape apart."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return parameter.numel() if shape is None else math.prod(shape)


def weights_dtype(parameters: Iterable[nn.Parameter]) -> str | None:
    """The type that most of the numbers in the weights have, of those that are not quantised."""
    counts: dict[torch.dtype, int] = {}
    for p in (p for p in parameters if p.is_floating_point()):
        counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return short_dtype(max(counts, key=lambda d: counts[d])) if counts else None


def _batch_size(batch: Any) -> tuple[int | None, int | None]:
    """(rows, sequence length): from the token ids where there are any, else rows from the first tensor."""
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if isinstance(ids, Tensor) and ids.dim() == 2:
        return ids.shape[0], ids.shape[1]
    first = next((t for t in nested_tensors(batch) if t.dim()), None)
    return (None if first is None else first.shape[0]), None
