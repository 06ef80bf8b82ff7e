"""The ghost runs that every search begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.errors import UsageError
from autockpt.profiling import Heads, Traces, Uniform, head_graphs, uniform_graphs
from autockpt.schema import Choice, Graph, SearchSpace, Unit, parse_choice
from autockpt.schema.choices import ChunkedLoss
from autockpt.tracing import Tracer

CHUNKS = (256, 1024, 4096)
"""Tokens of a chunk, where head and loss run in chunks: fewer hold fewer logits, more keep a device busier."""


@dataclass(frozen=True)
class Traced:
    """Ghost runs that a search begins with, and the space without choices that the model refuses.

    ``uniform`` are plans with one choice on every layer, ``heads`` those with a choice on the output head alone. With a
    ``twin``, a shallow model that stands for a deep one, they are of that; ``base`` is the whole model's plain step.
    """

    tracer: Tracer
    uniform: Uniform
    heads: Heads | None
    space: SearchSpace
    notes: tuple[str, ...] = ()
    twin: Traces | None = None
    base: Graph | None = None


def traced(tracer: Tracer, space: SearchSpace, inexact: bool, notes: Sequence[str] = ()) -> Traced:
    """Ghost-run what a search begins with. Raises UsageError for a model without blocks to choose for."""
    uniform, space, refused = uniform_plans(tracer, space)
    if inexact and tracer.head is None:
        refused = (*refused, "--allow-inexact changes nothing: the model has no output head")
    heads = head_graphs(tracer, tracer.head, head_choices(space, inexact))
    return Traced(tracer, uniform, heads, space, (*notes, *refused))


def head_choices(space: SearchSpace, inexact: bool) -> tuple[Choice, ...]:
    """What the output head may do besides saving."""
    chunked = (ChunkedLoss(tokens=tokens) for tokens in CHUNKS)
    return (*map(parse_choice, space.head), *(chunked if inexact else ()))


def uniform_plans(tracer: Tracer, space: SearchSpace) -> tuple[Uniform, SearchSpace, tuple[str, ...]]:
    """Ghost runs of the uniform plans, the space without choices that the model refuses, and a note on those.

    Raises UsageError for a model without blocks to choose for.
    """
    uniform = uniform_graphs(tracer, blocks_of(tracer), space.choices)
    return uniform, *allowed(space, uniform)


def blocks_of(tracer: Tracer) -> tuple[Unit, ...]:
    """The blocks to choose for. Raises UsageError where there are none."""
    blocks = tuple(u for u in tracer.units if u.role == "block")
    if not blocks:
        raise UsageError(
            "the model has no repeated blocks, so there is nothing to choose per layer",
            remedy="autockpt plans for members of an nn.ModuleList or nn.Sequential, and for transformers' layers.",
        )
    return blocks


def allowed(space: SearchSpace, uniform: Uniform) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without choices that have no ghost run, because the model refuses them, and a note on those."""
    refused = [kind for kind in space.choices if kind not in uniform]
    if not refused:
        return space, ()
    note = f"not for this model: {', '.join(refused)} (apply such a plan to see why)"
    return space.restricted((*uniform, *space.head)), (note,)
