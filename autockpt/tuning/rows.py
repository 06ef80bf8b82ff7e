"""Detect rows of a batch that depend on each other: there another micro-batch would be another training.

Two batch sizes are ghost-run. An op of the forward whose output grows with the square of the rows compares rows
(contrastive losses). An op whose input grows with the rows and whose output has several numbers and does not grow
combines rows (batch norm, balancing losses of experts). A loss that is one number is a mean of its rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from autockpt.errors import AutockptError, UsageError
from autockpt.schema import Graph, SearchRequest
from autockpt.schema.graph import Op
from autockpt.tracing.kernels.signature import parse_signature
from autockpt.tuning.sizes import WhatIf, tracer_of

SIZES = (2, 3)
"""Rows of the two runs: single rows are broadcast, and batch norms refuse them."""
_COUNTS = ("aten.histc", "aten.bincount")  # how many tokens go to each expert: no gradient comes of that


def meetings(small: Graph, large: Graph) -> Iterator[tuple[bool, str]]:
    """Where rows depend on each other, by the traced steps of ``SIZES`` rows; some places more than once.

    Whether that surely makes another training, or another one of its terms alone; and the op with its module.
    """
    few, many = SIZES
    others = dict(_numbered(large))
    for key, op in _numbered(small):
        other = others.get(key)
        if other is None:
            continue
        read, wrote = _taken(small, op), _given(op)
        read_of_more, wrote_of_more = _taken(large, other), _given(other)
        if len(read) != len(read_of_more) or len(wrote) != len(wrote_of_more):
            continue
        squared = any(one * many**2 == two * few**2 for one, two in zip(wrote, wrote_of_more, strict=True))
        grows = any(one != two for one, two in zip(read, read_of_more, strict=True))
        view = any(made.storage in op.inputs for made in op.outputs)
        together = grows and not view and wrote == wrote_of_more and any(count > 1 for count in wrote)
        normed = "batch_norm" in op.target and len(op.outputs) > 1 and math.prod(op.outputs[1].shape) > 0
        if squared or together or normed:
            name = op.target.removeprefix("aten.").partition(".")[0]
            yield squared or normed, f"{name} in {op.module}" if op.module else name


def _numbered(graph: Graph) -> Iterator[tuple[tuple[str, str, int], Op]]:
    """The ops of the forward, each by its module, its name and how often that came before there."""
    before = Counter[tuple[str, str]]()
    for op in graph.ops:
        if op.phase == "forward" and not op.target.startswith(_COUNTS):
            name = (op.module, op.target)
            before[name] += 1
            yield (*name, before[name]), op


def _taken(graph: Graph, op: Op) -> list[int]:
    """How many numbers each floating tensor holds that the op reads."""
    tensors = parse_signature(graph.signatures[op.signature]).tensors()
    return [math.prod(tensor.shape) for tensor in tensors if tensor.dtype.lstrip("b").startswith("f")]


def _given(op: Op) -> list[int]:
    """The same of what it returns, empty tensors left out."""
    return [count for made in op.outputs if "f" in made.dtype and (count := math.prod(made.shape))]


def dependent_rows(job: Callable[[int], SearchRequest], what_if: WhatIf) -> tuple[str, ...]:
    """Notes on terms that take rows together. Raises UsageError where another micro-batch is another training.

    Where the model cannot be ghost-run at these sizes a note says that this was not looked at.
    """
    graphs = []
    try:
        for size in SIZES:
            with tracer_of(job(size), what_if.device) as tracer:
                graphs.append(tracer.trace())
    except AutockptError as error:
        return (f"Whether rows of a batch depend on each other was not looked at: {error.message}",)
    found = dict.fromkeys(meetings(*graphs))
    if certain := [where for sure, where in found if sure]:
        raise UsageError(
            f"the rows of this model's batch depend on each other ({certain[0]}): another micro-batch is another "
            "training",
            remedy="Keep the batch size as it is, and search without a global batch.",
        )
    if not found:
        return ()
    where = ", ".join([where for _, where in found][:3])
    return (
        f"Rows of a micro-batch are taken together ({where}), as balancing losses of experts do: with another "
        "micro-batch this term is another one, everything else stays.",
    )
