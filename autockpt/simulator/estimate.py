"""Seconds for op signatures that were never timed, from those that were."""

from __future__ import annotations

from math import prod
from statistics import median

from autockpt.schema.graph import Graph, Op

UNTOUCHED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Ops, by ``base_name``, that make or change a tensor without touching its bytes."""
BITS = {"bool": 8, "complex64": 64, "complex128": 128}


def base_name(target: str) -> str:
    """``aten.add.Tensor`` → ``add``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def element_bytes(dtype: str) -> float:
    """Bytes per element of a dtype as a Graph writes it (``torch.float32`` or ``float32``); 4 where it is unknown."""
    name = dtype.removeprefix("torch.")
    digits = "".join(c for c in name.split("_")[0].split("e")[0] if c.isdigit())  # float8_e4m3fn has 8 bits
    return BITS.get(name, int(digits) if digits else 32) / 8


def work_of(op: Op, storage_bytes: dict[int, int]) -> tuple[int, float]:
    """FLOPs of an op, and the bytes it reads and writes."""
    written = sum(prod(out.shape) * element_bytes(out.dtype) for out in op.outputs)
    return op.flops, written + sum(storage_bytes.get(s, 0) for s in op.inputs)


def estimate(graph: Graph, known: dict[int, float], missing: set[int]) -> dict[int, float]:
    """Seconds for each missing signature index, from the seconds of the ``known`` ones of the same graph.

    The nearest evidence wins: timed signatures of the same op, scaled by FLOPs (where both have them) or by bytes
    moved; else the median rate of all timed ops that do arithmetic, or that only move bytes. Zero where nothing was
    timed, and for ops that touch no bytes: those around what is offloaded are in no step that recomputes.
    """
    example = {op.signature: op for op in reversed(graph.ops)}
    sizes = {s.id: s.bytes for s in graph.storages}
    work = {i: work_of(op, sizes) for i, op in example.items() if i in known or i in missing}
    timed = [i for i in work if i in known]
    out: dict[int, float] = {}
    for i in missing:
        if i not in work:
            continue
        if (name := base_name(example[i].target)) in UNTOUCHED or name == "as_strided":
            out[i] = 0.0
            continue
        by_flops = work[i][0] > 0
        alike = [k for k in timed if (work[k][0] > 0) == by_flops]
        same = [k for k in alike if example[k].target == example[i].target]
        out[i] = _scaled(work, known, same or alike, i, by_flops)
    return out


def _scaled(
    work: dict[int, tuple[int, float]], known: dict[int, float], evidence: list[int], i: int, by_flops: bool
) -> float:
    which = 0 if by_flops else 1
    rates = [known[k] / work[k][which] for k in evidence if work[k][which] > 0]
    if rates and work[i][which] > 0:
        return median(rates) * work[i][which]
    return median(known[k] for k in evidence) if evidence else 0.0
