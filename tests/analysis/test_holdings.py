"""The bytes of real ghost runs, added up in every way there is."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from autockpt.analysis.holdings import COME_AND_GO, StepBytes, moment, peak_op
from autockpt.schema import OFFLOAD, RECOMPUTE, Choice, Graph, WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.samples import small_graph

MODELS = ("gpt2-tiny", "mixtral-tiny", "vit-tiny")


@pytest.fixture(scope="module", params=MODELS)
def traced(request: pytest.FixtureRequest) -> Iterator[tuple[Tracer, dict[str, Graph]]]:
    """Ghost runs of a model under three plans."""
    with Tracer.from_spec(WorkloadSpec(model=request.param, batch_size=2, accumulate=2)) as tracer:
        blocks = [u.name for u in tracer.units if u.role == "block"]
        plans: Mapping[str, dict[str, Choice]] = {
            "none": {},
            "recompute": dict.fromkeys(blocks, RECOMPUTE),
            "mixed": {n: OFFLOAD if i % 2 else RECOMPUTE for i, n in enumerate(blocks)},
        }
        yield tracer, {name: tracer.trace(choices) for name, choices in plans.items()}


def head(tracer: Tracer) -> str | None:
    return tracer.head.name if tracer.head else None


@pytest.mark.slow
def test_every_byte_of_the_peak_is_told_exactly_once(traced: tuple[Tracer, dict[str, Graph]]) -> None:
    tracer, graphs = traced
    for graph in graphs.values():
        held, at = StepBytes(graph, head(tracer), context_bytes=1234), peak_op(graph)
        holdings = held.holdings()
        assert sum(h.peak_bytes for h in holdings) == graph.peak_bytes + 1234
        moving = sum(h.peak_bytes for h in holdings if h.name in COME_AND_GO)
        assert sum(s.total for s in held.by_unit(at)) == moving > 0
        m = moment(held, at, listed=5)
        assert sum(a.total for a in m.alive) + m.other_bytes == moving and len(m.alive) == 5
        assert all(h.most_bytes >= h.peak_bytes >= 0 for h in holdings)


def test_every_byte_of_every_moment_is_told_exactly_once(traced: tuple[Tracer, dict[str, Graph]]) -> None:
    tracer, graphs = traced
    for graph in graphs.values():
        lines = StepBytes(graph, head(tracer)).timelines
        assert [int(v) for v in np.sum(list(lines.values()), axis=0)] == list(graph.timeline())
        assert all(int(line.min()) >= 0 for line in lines.values())


def test_purposes_follow_the_plan(traced: tuple[Tracer, dict[str, Graph]]) -> None:
    tracer, graphs = traced
    most = {plan: {h.name: h.most_bytes for h in StepBytes(g, head(tracer)).holdings()} for plan, g in graphs.items()}
    assert "recomputed" not in most["none"] and "brought back" not in most["none"]
    assert most["recompute"]["recomputed"] > 0 and "brought back" not in most["recompute"]
    assert most["recompute"]["kept for backward"] < most["none"]["kept for backward"]
    assert most["mixed"]["brought back"] > 0
    assert most["none"]["gradients"] == most["recompute"]["gradients"] >= most["none"]["weights"]
    if head(tracer):
        logits = most["none"]["logits and loss"]
        assert (
            2 * tracer.settings["batch_size"] * tracer.settings["seq_len"] * 512 <= logits < most["none"]["weights"] * 2
        )


def test_equal_units_are_one_line() -> None:
    graph = small_graph()
    held = StepBytes(graph, "head")
    at = 9  # both blocks are through their forward
    by_unit = {s.name: (s.bytes, s.count) for s in held.by_unit(at)}
    assert by_unit["h.0-1"] == (150, 2)
    inner = next(a for a in moment(held, at).alive if a.place == "attn" and a.bytes == 100)
    assert (inner.units, inner.count, inner.total, inner.purpose) == ("h.0-1", 2, 200, "kept for backward")


@pytest.mark.parametrize("returned", [True, False])
def test_outputs_that_the_last_stage_keeps_are_named(returned: bool) -> None:
    trained = build(WorkloadSpec(model="gpt2-tiny", batch_size=2, seq_len=64))
    logits = trained.model(**trained.batch).logits
    with Tracer.from_step(replace(trained, in_flight=1, accumulate=5, return_outputs=returned)) as tracer:
        graph = tracer.trace()
        most = {h.name: h.most_bytes for h in StepBytes(graph, head(tracer)).holdings()}
    # five micro-batches', and once more where they are merged
    assert most.get("kept by the pipeline", 0) == returned * 2 * 5 * logits.numel() * logits.element_size()
