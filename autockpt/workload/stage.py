"""Run the micro-batches of one stage of a pipeline alone, with as many in flight as its schedule has.

What the stage holds besides their activations is what ``torch.distributed.pipelining`` holds: a buffer for everything
that the stage receives, inputs and gradients of every micro-batch of the step; the gradients on their way to the stage
before; and the outputs of the last stage, which ``schedule.step`` merges and returns.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.workload import Stage, WorkloadSpec
from autockpt.workload.losses import inner_model
from autockpt.workload.storages import each_tensor, nested_tensors

if TYPE_CHECKING:
    from autockpt.workload.step import Mark, Report, Step


class _InFlight(NamedTuple):
    """A micro-batch between forward and backward, which starts from ``outputs`` with these gradients.

    ``returned`` is what the model gave: torch keeps it as long, logits of the last stage as well.
    """

    returned: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor]


class StageRun:
    """One step of a stage; what it holds to the step's end goes with this object.

    ``report`` receives the loss or the first output of every micro-batch, and every gradient for the stage before.
    """

    def __init__(self, step: Step, mark: Mark, report: Report) -> None:
        self._step, self._mark, self._report = step, mark, report
        self._received: list[Any] = []
        self._gradients: list[list[Tensor]] = []
        self._output: Any = None  # of the model, in the latest forward
        self._returned: list[list[Tensor]] = []
        self._sent: list[Tensor | None] = []

    def run(self, micro_batches: int) -> None:
        """Forward and backward of so many micro-batches, in the order of 1F1B, or of GPipe where all are in flight."""
        step, flying = self._step, deque[_InFlight]()
        hook = step.model.register_forward_hook(self._hear)
        try:
            for number in range(micro_batches):
                flying.append(self._forward(number))
                if number + 1 == micro_batches and self._returned:  # those that a ghost run leaves out are there, too
                    unrun, latest = step.accumulate - micro_batches, self._returned[-1]
                    self._returned += [[torch.empty_like(t) for t in latest] for _ in range(unrun)]
                while flying and (len(flying) == step.in_flight or number + 1 == micro_batches):
                    self._backward(flying.popleft())
        finally:
            hook.remove()
        self._sent = []
        for parts in zip(*self._returned, strict=True):
            torch.cat(parts)  # for the caller of schedule.step, who lets go of it

    def _hear(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        self._output = output

    def _forward(self, number: int) -> _InFlight:
        step = self._step
        self._mark("forward")
        if not self._received:
            self._received = [each_tensor(step.batch, _received) for _ in range(step.accumulate)]
        batch = self._received[number]
        outputs = [tensor for tensor in nested_tensors(step.forward(batch)) if tensor.requires_grad]
        if not outputs:
            raise WorkloadError(
                "no output of the stage depends on a trainable parameter, so there is no backward pass to plan",
                remedy="Check that parameters have requires_grad=True and that the stage returns tensors.",
            )
        self._report(outputs[0].detach())
        if len(outputs) == 1 and outputs[0].numel() == 1:  # the last stage: a loss
            if step.return_outputs:
                self._returned.append([t.detach() for t in nested_tensors(self._output) if t.dim()])
            outputs = [step.scaled(outputs[0])]
            gradients = [torch.ones_like(outputs[0])]
        else:
            if not self._gradients:
                self._gradients = [[torch.ones_like(t) for t in outputs] for _ in range(step.accumulate)]
            gradients = self._gradients[number]
        returned, self._output = self._output, None
        return _InFlight(returned, [t for t in nested_tensors(batch) if t.requires_grad], outputs, gradients)

    def _backward(self, micro_batch: _InFlight) -> None:
        self._mark("backward")
        torch.autograd.backward(micro_batch.outputs, micro_batch.gradients)
        self._sent = [tensor.grad for tensor in micro_batch.inputs]
        for tensor in micro_batch.inputs:
            tensor.grad = None
        for gradient in self._sent:
            if gradient is not None:
                self._report(gradient)


def _received(tensor: Tensor) -> Tensor:
    """What the stage before sends is a new tensor for each micro-batch; everything else is the user's own."""
    return tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor


# --- a stage out of a model of transformers, by the plan for pipelines that comes with its configuration


class Elsewhere(nn.Module):
    """Stands for a module that another stage has: hands on what it is given."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The same hidden states."""
        return hidden


def hidden_states(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """What a stage that is not the last sends on."""
    return inner_model(model).base_model(**batch, use_cache=False)[0]  # type: ignore[operator]


def cut(model: nn.Module, batch: dict[str, Any], spec: WorkloadSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The batch of ``spec.stage`` and what else its Step needs. The model loses its other parts.

    Modules keep the names that they have in the whole model, so one plan serves a stage however it is cut out. Raises
    UsageError for a model that has no plan for pipelines, or other layers than the stages have.
    """
    number, stages, sizes, schedule = Stage.parse(spec.stage or "")
    if number is None:
        raise UsageError(
            f"`stage: {spec.stage}` are all stages of a pipeline, which `autockpt search` alone takes one by one",
            remedy=f"Name one: `stage: {Stage.parse(spec.stage or '').single()[0]}`.",
        )
    inner: Any = inner_model(model)
    base = getattr(inner, "base_model", inner)
    names = list(getattr(getattr(base, "config", None), "base_model_pp_plan", None) or ())
    at = next((i for i, name in enumerate(names) if isinstance(getattr(base, name, None), nn.ModuleList)), None)
    if at is None:
        raise UsageError(
            f"{type(inner).__name__} cannot be cut into stages: transformers has no plan for it",
            remedy="Name a function instead of the model that returns autockpt.Step(stage, batch, in_flight=k).",
        )
    layers: Any = getattr(base, names[at])
    if len(layers) < stages or (sizes is not None and sum(sizes) != len(layers)):
        raise UsageError(
            f"`stage: {spec.stage}` does not divide {type(inner).__name__}: it has {len(layers)} layers",
            remedy="Give each stage at least one layer, and all of them together as many as the model has.",
        )
    first, last = number == 0, number == stages - 1
    sizes = sizes or tuple(sum(i * stages // len(layers) == s for i in range(len(layers))) for s in range(stages))
    own = range(sum(sizes[:number]), sum(sizes[: number + 1]))
    for name in (*(() if first else names[:at]), *(() if last else names[at + 1 :])):
        setattr(base, name, Elsewhere())
    for i in range(len(layers)):
        if i not in own:
            layers[i] = Elsewhere()
    if not last:
        inner.set_output_embeddings(Elsewhere())
        batch = {name: value for name, value in batch.items() if name != "labels"}
    if not first:
        ids = batch["input_ids"]
        dtype = next(p.dtype for p in base.parameters() if p.is_floating_point())
        size = (*ids.shape, base.config.get_text_config().hidden_size)
        hidden = torch.randn(size, dtype=dtype, device=ids.device, requires_grad=True)
        batch = {name: value for name, value in batch.items() if name != "input_ids"} | {"inputs_embeds": hidden}
    held = spec.accumulate if schedule == "gpipe" else min(spec.accumulate, stages - number)
    return batch, {"loss": None if last else hidden_states, "in_flight": held}
