"""Refuse models in which rows of a batch depend on each other: with another micro-batch they would train otherwise.

Two batch sizes are ghost-run. An op of the forward whose output grows with the square of the rows compares rows, as
contrastive losses do. A batch norm that returns the statistics of its batch combines them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from autockpt.errors import AutockptError, UsageError
from autockpt.schema import Graph, SearchRequest
from autockpt.schema.graph import Op
from autockpt.tuning.sizes import tracer_of

SIZES = (2, 3)
"""Rows of the two runs: single rows are broadcast, and batch norms refuse them."""


def refuse_dependent_rows(job: Callable[[int], SearchRequest], device: torch.device) -> None:
    """Raise UsageError where another micro-batch is another training.

    A model that cannot be ghost-run at these sizes passes.
    """
    graphs = list[Graph]()
    with suppress(AutockptError):
        for size in SIZES:
            with tracer_of(job(size), device) as tracer:
                graphs.append(tracer.trace())
    if len(graphs) == len(SIZES) and (where := next(meetings(*graphs), "")):
        raise UsageError(
            f"the rows of this model's batch depend on each other ({where}): another micro-batch is another training",
            remedy="Keep the batch size as it is, and search without a global batch.",
        )


def meetings(small: Graph, large: Graph) -> Iterator[str]:
    """Ops that read several rows at once, with their modules, by the traced steps of ``SIZES`` rows."""
    few, many = SIZES
    others = dict(_numbered(large))
    for key, op in _numbered(small):
        counts, more = _elements(op), _elements(others[key]) if key in others else []
        squared = any(one * many**2 == two * few**2 for one, two in zip(counts, more, strict=False))
        if squared or ("batch_norm" in op.target and len(op.outputs) > 1 and math.prod(op.outputs[1].shape) > 0):
            name = op.target.removeprefix("aten.").partition(".")[0]
            yield f"{name} in {op.module}" if op.module else name


def _numbered(graph: Graph) -> Iterator[tuple[tuple[str, str, int], Op]]:
    """The ops of the forward, each by its module, its name and how often that came before there."""
    before = Counter[tuple[str, str]]()
    for op in graph.ops:
        if op.phase == "forward":
            name = (op.module, op.target)
            before[name] += 1
            yield (*name, before[name]), op


def _elements(op: Op) -> list[int]:
    """How many numbers each floating tensor holds that the op returns, empty ones left out."""
    return [count for made in op.outputs if "f" in made.dtype and (count := math.prod(made.shape))]
