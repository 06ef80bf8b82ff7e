"""A traced cycle as arrays with an entry per op: bytes over time, phases, micro-batches."""

from __future__ import annotations

import numpy as np

from autockpt.schema.graph import PHASES, Graph


def bytes_timeline(graph: Graph) -> np.ndarray:
    """Device bytes at each op, int64."""
    return np.fromiter(graph.timeline(), dtype=np.int64, count=len(graph.ops))


def phases_of(graph: Graph) -> np.ndarray:
    """The phase of each op, int64, as its index in ``PHASES``."""
    number = {name: i for i, name in enumerate(PHASES)}
    return np.array([number[op.phase] for op in graph.ops], dtype=np.int64)


def micro_batch_of(graph: Graph) -> np.ndarray:
    """The micro-batch of each op: a new one begins where forward follows backward.

    In a stage of a pipeline these are a forward of one micro-batch and the backward of another that follows it, as both
    have as many in flight; and by itself each forward before the first backward, each backward after the last forward.
    """
    forward = phases_of(graph) == PHASES.index("forward")
    begins = np.zeros(len(forward), dtype=np.int64)
    begins[1:] = forward[1:] & ~forward[:-1]
    at = np.array([index for index in graph.begins if 0 < index < len(forward)], dtype=np.int64)
    begins[at] = forward[at] | ~forward[at - 1]
    return np.cumsum(begins)
