"""Numbers of a traced cycle, op by op: bytes over time, phases, micro-batches, bytes of an element."""

from __future__ import annotations

import numpy as np

from autockpt.schema.graph import PHASES, Graph

BITS = {"bool": 8, "complex64": 64, "complex128": 128}


def element_bytes(dtype: str) -> float:
    """Bytes per element of a dtype as a Graph writes it (``torch.float32`` or ``float32``); 4 where it is unknown."""
    name = dtype.removeprefix("torch.")
    digits = "".join(c for c in name.split("_")[0].split("e")[0] if c.isdigit())  # float8_e4m3fn has 8 bits
    return BITS.get(name, int(digits) if digits else 32) / 8


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
