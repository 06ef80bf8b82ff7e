"""Jobs of other sizes: steps with fewer or more rows, or shorter ones, and their tracers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from autockpt.errors import UsageError
from autockpt.schema import SearchRequest
from autockpt.tracing import Tracer, tracer_for
from autockpt.workload import Step, cut_tensors, nested_tensors
from autockpt.workload.lengths import with_length

T = TypeVar("T")


def largest_that_fits(sizes: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """The first of ``sizes`` that fits, each smaller than the one before, so that all behind it fit. By bisection."""
    if not sizes or not fits(sizes[-1]):
        return None
    return sizes[bisect_left(sizes, True, key=fits)]


def tracer_of(job: SearchRequest, device: torch.device) -> Tracer:
    """A tracer of what a request trains. Raises what ``Tracer.from_spec`` and ``Tracer.from_step`` do."""
    if job.workload is None:
        return Tracer.from_step(job.step, fallback=False)
    return tracer_for(job.hardware, job.workload, device=device, fallback=False)


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
