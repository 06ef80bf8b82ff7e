"""Where the seconds of a step go, how fast that is, and what bounds each part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from autockpt.analysis.kinds import ATTENTION, LOSS, OpKinds
from autockpt.cost.roofline import bound_of, peak_flops
from autockpt.cost.step import op_seconds, simulate
from autockpt.cost.work import work_of_op
from autockpt.schema import Graph, Hardware, Op, OpTimes
from autockpt.schema.explanation import Bound, Part, Speed
from autockpt.schema.names import ancestors
from autockpt.tracing.kernels.timeline import bytes_timeline

SCORES, PROJECTIONS, FEED_FORWARD = "attention itself", "attention's projections", "feed-forward"
BETWEEN, OUTSIDE, OPTIMIZER, COPIES = "norms and residuals", "embedding, head, loss", "optimizer", "waiting for copies"


def speed_of(
    graph: Graph, plain: Graph, times: OpTimes, hardware: Hardware | None, tokens: int | None, measured: float | None
) -> Speed | None:
    """The speed of a traced step; None where nothing is known about its seconds.

    ``plain``: the same step with everything saved. ``measured``: seconds of real steps, in place of modelled ones.
    """
    said = simulate(graph, times)
    if said.step_seconds <= 0:
        return None
    each = op_seconds(graph, times) * graph.runs
    overhead = times.device.overhead_bytes
    average = float((bytes_timeline(graph) * each).sum() / max(each.sum(), 1e-12))
    return Speed(
        seconds=measured or said.step_seconds,
        flops=graph.flops,
        model_flops=plain.flops,
        peak_flops=peak_flops(hardware, plain) if hardware is not None else None,
        tokens=tokens,
        average_bytes=int(average) + overhead,
        parts=_parts(graph, each, hardware, said.copy_seconds),
    )


def _parts(graph: Graph, each: np.ndarray, hardware: Hardware | None, copying: float) -> tuple[Part, ...]:
    """Parts by name, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, int] = defaultdict(int)
    moved: dict[str, float] = defaultdict(float)
    bounds: dict[str, dict[Bound, float]] = defaultdict(lambda: defaultdict(float))
    part_of = part_namer(graph)
    for op, runs, took in zip(graph.ops, graph.runs, each, strict=True):
        part = part_of(op)
        work = work_of_op(op, graph.signatures[op.signature])
        seconds[part] += float(took)
        flops[part] += op.flops * runs
        moved[part] += work.bytes * runs
        if hardware is not None and part != OPTIMIZER and (bound := bound_of(hardware, work, float(took))) is not None:
            bounds[part][bound] += float(took)
    found = [
        Part(
            name=name,
            seconds=took,
            flops=flops[name],
            bytes=moved[name],
            bound=max(bounds[name], key=lambda b: bounds[name][b]) if bounds[name] else None,
        )
        for name, took in seconds.items()
        if took > 0
    ]
    if copying > 0:
        moved_by_copies = sum(c.bytes * times for c, times in zip(graph.copies, graph.copied, strict=True))
        found.append(Part(name=COPIES, seconds=copying, bytes=moved_by_copies, bound="link"))
    return tuple(sorted(found, key=lambda part: -part.seconds))


def part_namer(graph: Graph) -> Callable[[Op], str]:
    """What names the part of a step that an op belongs to.

    What runs again by itself, outside of the modules that ran it first, belongs where the first such op of its unit's
    forward does.
    """
    roles = {unit.name: unit.role for unit in graph.units}
    kinds = OpKinds(graph)
    first: dict[tuple[str, int], str] = {}
    for op in graph.ops:
        if op.phase == "forward" and op.unit is not None:
            first.setdefault((op.unit, op.signature), op.module)

    def name(op: Op) -> str:
        if op.phase == "optimizer":
            return OPTIMIZER
        kind, module = kinds.of(op), op.module
        if op.phase == "recompute" and op.unit is not None and module == op.unit:
            module = first.get((op.unit, op.signature), module)
        role = next((roles[m] for m in (module, *ancestors(module)) if roles.get(m) in ("attention", "mlp")), None)
        if kind == ATTENTION or (role == "attention" and (kind == "softmax" or "bmm" in op.target)):
            return SCORES
        if role is not None:
            return PROJECTIONS if role == "attention" else FEED_FORWARD
        return OUTSIDE if op.unit is None or kind == LOSS else BETWEEN

    return name
