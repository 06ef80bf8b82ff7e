"""Ghost runs of plans with segments: the bytes are the allocator's, and every op that runs again is its unit's."""

from __future__ import annotations

from collections import Counter

import pytest

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Segment
from autockpt.schema.graph import Graph
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.tracing.reference import Real, ops_of, same_names

pytestmark = pytest.mark.slow

MIXES: tuple[tuple[Choice, ...], ...] = (
    (SAVE, Segment(), Segment(), OFFLOAD),
    (Segment(), Segment(), RECOMPUTE, Segment(size=3)),
)


def matrix_products(graph: Graph, phase: str) -> Counter[str | None]:
    return Counter(op.unit for op in graph.ops if op.phase == phase and op.flops)


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_peaks_are_the_allocators(model: str) -> None:
    spec = WorkloadSpec(model=model)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        names = [unit.name for unit in tracer.units if unit.role == "block"]
        sizes = [Segment(size=size) for size in (2, 3, len(names))]
        if model == "llama-tiny":
            plans = [dict.fromkeys(names, way) for way in sizes]
        else:
            plans = [dict(zip(names, mix, strict=True)) for mix in MIXES]
        tracer.trace(plans[0])  # whatever is made once and kept
        graphs = [tracer.trace(plan) for plan in plans]
    workload = build(spec)
    for plan, graph in zip(plans, graphs, strict=True):
        real = Real(workload, plan)
        assert graph.source == "ghost"
        assert graph.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)
        if OFFLOAD not in plan.values():  # real copies are ops, ghostly ones are not
            assert ops_of(graph) == same_names(real.ops)
    if model == "llama-tiny":
        peaks = [graph.peak_bytes for graph in graphs]
        assert peaks[0] < peaks[1] < peaks[2]


def test_every_op_that_runs_again_is_its_units() -> None:
    with Tracer.from_spec(WorkloadSpec(model="llama-tiny"), fallback=False) as tracer:
        names = [unit.name for unit in tracer.units if unit.role == "block"]
        graph = tracer.trace(dict.fromkeys(names, Segment(size=len(names))))
    forward, again = (matrix_products(graph, phase) for phase in ("forward", "recompute"))
    wanted = {name: forward[name] for name in names}
    wanted[names[-1]] = forward[names[-1]] - 1  # the last unit does not need its last product
    assert again == wanted
    own = Counter(op.module for op in graph.ops if op.phase == "recompute" and op.target == "aten.add.Tensor")
    assert set(names) <= set(own)  # the residual sums are computed by the units themselves
