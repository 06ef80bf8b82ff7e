"""Parts of a step, as courses speak of them: which an op belongs to, and what bounds their seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from autockpt.analysis.explain import Subject
from autockpt.cost.roofline import seconds_of_work
from autockpt.cost.step import base_name
from autockpt.cost.work import Work, work_of_op
from autockpt.schema import Graph, Hardware, Op, WorkloadSpec
from autockpt.schema.names import ancestors
from autockpt.tracing import Tracer

SCORES, PROJECTIONS, FEED_FORWARD = "attention itself", "attention's projections", "feed-forward"
BETWEEN, OUTSIDE, OPTIMIZER = "norms and residuals", "embedding, head, loss", "optimizer"
_OF_SCORES = ("bmm", "baddbmm", "matmul", "_softmax", "softmax", "_safe_softmax", "_softmax_backward_data")


def part_namer(graph: Graph) -> Callable[[Op], str]:
    """What names the part of a step that an op belongs to.

    What runs again by itself, outside of the modules that ran it first, belongs where the first such op of its unit's
    forward does.
    """
    roles = {unit.name: unit.role for unit in graph.units}
    first: dict[tuple[str, int], str] = {}
    for op in graph.ops:
        if op.phase == "forward" and op.unit is not None:
            first.setdefault((op.unit, op.signature), op.module)

    def name(op: Op) -> str:
        if op.phase == "optimizer":
            return OPTIMIZER
        module = op.module
        if op.phase == "recompute" and op.unit is not None and module == op.unit:
            module = first.get((op.unit, op.signature), module)
        role = next((roles[m] for m in (module, *ancestors(module)) if roles.get(m) in ("attention", "mlp")), None)
        if "attention" in op.target or (role == "attention" and base_name(op.target) in _OF_SCORES):
            return SCORES
        if role is not None:
            return PROJECTIONS if role == "attention" else FEED_FORWARD
        return OUTSIDE if op.unit is None or "_loss" in op.target else BETWEEN

    return name


def bound_by(hardware: Hardware, graph: Graph, seconds: Iterable[float]) -> str | None:
    """What most of a step's ``seconds``, one for each op, are bound by: launches, arithmetic or bandwidth."""
    spent: Counter[str] = Counter()
    for op, took in zip(graph.ops, seconds, strict=True):
        work = work_of_op(op, graph.signatures[op.signature])
        if op.phase != "optimizer" and work.kind != "none":
            spent[_bound(hardware, work, took)] += round(1e9 * took)
    return spent.most_common(1)[0][0] if spent else None


def _bound(hardware: Hardware, work: Work, took: float) -> str:
    alone = seconds_of_work(hardware, work)
    if took > 1.5 * alone:
        return "launches"
    endless = hardware.model_copy(update={"bandwidth": 1e18, "cache_bandwidth": None})
    return "bandwidth" if seconds_of_work(endless, work) < alone else "arithmetic"


def tracer_of(subject: Subject, spec: WorkloadSpec) -> Tracer:
    """A tracer of another workload than the subject's, on its device or for its hardware. Ghost runs alone."""
    question = subject.question
    return Tracer.from_spec(spec, hardware=question.hardware, device=question.torch_device, fallback=False)
