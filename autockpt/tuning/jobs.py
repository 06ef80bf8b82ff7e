"""A job and its variants: what a smaller batch, another optimizer or shorter sequences would make of it.

Jobs are described by a spec, and built anew for every variant, or live: a model, a batch and an optimizer at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autockpt.errors import UsageError
from autockpt.schema import Hardware, SearchRequest, WorkloadSpec
from autockpt.schema.remedy import FOUR_BITS, joined
from autockpt.tracing import Tracer, tracer_for
from autockpt.workload import Step, cut_tensors, nested_tensors
from autockpt.workload.factory import is_factory
from autockpt.workload.lengths import with_length

_ADAPTERS = "adapters only are trained"
FUSED, EIGHT_BIT, PLAIN = "adamw_fused", "adamw8bit", "sgd"
LEANER_OPTIMIZERS = {
    FUSED: "no temporaries of the optimizer; the same update up to rounding",
    EIGHT_BIT: "optimizer states in 8 bits; other training",
    PLAIN: "no optimizer states; other training",
}
"""The mildest first, and what each changes."""


@dataclass(frozen=True)
class Described:
    """A job by its spec, run on a device at hand or, with ``hardware``, simulated.

    Variants are None where a job has no such.
    """

    spec: WorkloadSpec
    hardware: Hardware | None = None

    @property
    def accumulate(self) -> int:
        return self.spec.accumulate

    @property
    def ranks(self) -> int | None:
        """Devices that weights are shared by; None where that cannot be simulated."""
        return None if self.hardware is None else self.spec.shard or 1

    def smaller_batch(self, rows: int, fewer: int) -> Described:
        """``fewer`` of ``rows`` in a micro-batch, and as many more of these."""
        return self._with(batch_size=fewer, accumulate=self.spec.accumulate * (rows // fewer))

    def shorter(self, length: int, tokens: int) -> Described:
        """Sequences of ``tokens`` instead of ``length``."""
        return self._with(seq_len=tokens, pad_to=None)

    def leaner_optimizers(self) -> Iterator[tuple[str, Described]]:
        """The same with an optimizer that holds less, by its name; the mildest first.

        AdamW in one kernel, which holds no temporaries; states in 8 bits, which take a library and CUDA; SGD.
        """
        if (now := self.spec.optimizer) not in ("none", PLAIN):
            tried = {FUSED: now == "adamw", EIGHT_BIT: now != EIGHT_BIT and self.hardware is not None, PLAIN: True}
            yield from ((name, self._with(optimizer=name)) for name, wanted in tried.items() if wanted)

    def adapted(self, rank: int) -> Iterator[tuple[str, str, Described]]:
        """Adapters of this rank alone trained, then these on a base in 4 bits; the name, the effect, and the job.

        Only what this job has not already, and what can be put on it.
        """
        spec, options = self.spec, ""
        if spec.lora is None:
            options = f"LoRA of rank {rank}"
            yield options, _ADAPTERS, self._with(lora=rank)
        if not (spec.load_in_4bit or spec.load_in_8bit or spec.quantization or is_factory(spec.model)):
            effect = f"{_ADAPTERS} on a base in 4 bits" if options else "the base in 4 bits"
            options = joined(options, FOUR_BITS)
            yield options, effect, self._with(lora=spec.lora or rank, load_in_4bit=True)

    def sharded(self, ranks: int) -> Described:
        return self._with(shard=ranks)

    def tracer(self, device: torch.device) -> Tracer:
        """Raises what ``Tracer.from_spec`` and ``Tracer.from_step`` do."""
        return tracer_for(self.hardware, self.spec, device=device, fallback=False)

    def _with(self, **update: Any) -> Described:
        return replace(self, spec=self.spec.model_copy(update=update))


@dataclass(frozen=True)
class Live:
    """A job by a training step at hand, none of whose tensors is touched."""

    step: Step
    ranks: int | None = None

    @property
    def accumulate(self) -> int:
        return self.step.accumulate

    def smaller_batch(self, rows: int, fewer: int) -> Live | None:
        if self.step.settings.get("batch_size") != rows:
            return None
        step = with_rows(self.step, fewer, self.step.accumulate * (rows // fewer))
        return None if step is None else replace(self, step=step)

    def shorter(self, length: int, tokens: int) -> Live | None:
        """Ids, labels and masks cut; None where the step is a function that brings its own batch."""
        if self.step.full_step is not None:
            return None
        return self._with(batch=cut_tensors(self.step.batch, partial(_cut, length=length, tokens=tokens)))

    def leaner_optimizers(self) -> Iterator[tuple[str, Live]]:
        optimizer = self.step.optimizer
        if optimizer is None or isinstance(optimizer, torch.optim.SGD) or self.step.full_step is not None:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        yield PLAIN, self._with(optimizer=torch.optim.SGD(trained, lr=1e-3))

    def adapted(self, rank: int) -> Iterator[tuple[str, str, Live]]:
        """None: a model at hand is trained as it is. A described one is asked for these."""
        return iter(())

    def sharded(self, ranks: int) -> Live:
        return self

    def tracer(self, device: torch.device) -> Tracer:
        return Tracer.from_step(self.step, fallback=False)

    def _with(self, **update: Any) -> Live:
        return replace(self, step=replace(self.step, **update, settings={}))


Job = Described | Live
"""What changes can be made to; both answer to the same names."""


def job_of(request: SearchRequest) -> Job:
    """What a request trains."""
    return Live(request.step) if request.workload is None else Described(request.workload, request.hardware)


def with_rows(step: Step, rows: int, accumulate: int) -> Step | None:
    """The step with micro-batches of ``rows``: the first ones of its batch, repeated where that has fewer.

    None for a batch whose tensors are not all as many rows long: which part of them is whose is not known.
    """
    tensors = [tensor for tensor in nested_tensors(step.batch) if tensor.dim()]
    have = tensors[0].shape[0] if tensors else 0
    if step.full_step is not None or not have or any(tensor.shape[0] != have for tensor in tensors):
        return None

    def taken(tensor: Tensor) -> Tensor:
        if not tensor.dim() or rows == have:
            return tensor
        more = tensor if rows <= have else tensor.repeat(-(-rows // have), *[1] * (tensor.dim() - 1))
        return more[:rows]

    batch = cut_tensors(step.batch, taken)
    if any(tensor.dim() and tensor.shape[0] != rows for tensor in nested_tensors(batch)):
        return None
    return step.with_batch(batch, accumulate)


def resized(step: Step, field_name: str, size: int) -> Step:
    """The step with a batch of so many rows (``batch_size``), or tokens a row (``seq_len``), what it has repeated.

    What fits is asked of it, not the same training: rows may depend on each other. Raises UsageError for a batch that
    has no such dimension.
    """
    if field_name == "seq_len":
        return with_length(step, size)
    if (made := with_rows(step, size, step.accumulate)) is None:
        raise UsageError(
            "this batch cannot be divided into rows: its tensors do not all begin with as many of them",
            remedy="Give autockpt.Step(model, batch) whose tensors are (rows, …).",
        )
    return made


def _cut(tensor: Tensor, length: int, tokens: int) -> Tensor:
    """A batch's tensor with its dimension of ``length`` after the first cut: (rows, tokens) or (rows, …, tokens)."""
    if tensor.dim() == 2 or (tensor.dim() == 4 and tensor.shape[-2] in (1, length)):
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, tokens)
    return tensor
