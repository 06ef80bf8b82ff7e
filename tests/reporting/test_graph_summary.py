from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autockpt.reporting.area import resampled
from autockpt.reporting.trace_view import REMAINDER, GraphSummary, summarise
from autockpt.schema import Graph
from tests.reporting.samples import small_graph


def by_name(summary: GraphSummary) -> dict[str, tuple[int, int, int]]:
    return {u.name: (u.saved_bytes, u.boundary_bytes, u.flops) for u in summary.units}


def test_bytes_and_flops_by_hand() -> None:
    summary = summarise(small_graph())
    # a block keeps its attention's 100, its MLP's 40 and its output of 10; transients of 500 are not kept
    assert by_name(summary) == {
        "h.0-1": (150, 10, 110),
        "h.0-1.mlp": (40, 100, 20),
        # embedding 10, mask 7, loss 5; the mask belongs to nobody's boundary: both blocks read it
        REMAINDER: (22, 0, 10),
    }
    assert summary.saved_bytes == 2 * 150 + 22 and summary.flops == 2 * 110 + 10
    assert abs(sum(u.share for u in summary.units if not u.inner) - 1) < 1e-9
    assert [u.count for u in summary.units] == [2, 2, 1]


def test_the_peak_is_where_the_bytes_are() -> None:
    graph = small_graph()
    peak = summarise(graph).peak
    timeline = list(graph.timeline())
    assert peak.bytes == graph.peak_bytes == timeline[peak.op] == sum(peak.by_kind.values())
    assert (peak.op, peak.phase, peak.module, peak.owner) == (11, "backward", "h.1.attn", "h.1")
    assert peak.by_kind["gradient"] == 900 and peak.by_kind["resident"] == 1000


def test_phases_are_runs_and_recompute_is_part_of_backward() -> None:
    spans = summarise(small_graph()).spans
    assert [(s.phase, s.start, s.stop) for s in spans] == [
        ("forward", 0, 11),
        ("backward", 11, 13),
        ("optimizer", 13, 14),
    ]


def test_units_that_differ_stand_apart() -> None:
    graph = small_graph()
    storages = tuple(s.model_copy(update={"bytes": 101}) if s.id == 2 else s for s in graph.storages)
    summary = summarise(graph.model_copy(update={"storages": storages}))
    assert [u.name for u in summary.units] == ["h.0", "h.0.mlp", "h.1", "h.1.mlp", REMAINDER]


def test_sub_units_stand_under_their_blocks() -> None:
    graph = small_graph()
    ops = tuple(o.model_copy(update={"flops": 31}) if o.index == 2 else o for o in graph.ops)
    summary = summarise(graph.model_copy(update={"ops": ops}))
    assert [u.name for u in summary.units] == ["h.0", "h.0.mlp", "h.1", "h.1.mlp", REMAINDER]


def test_stray_forward_ops_are_no_micro_batch() -> None:
    graph = small_graph()
    last = graph.ops[-1]
    stray = last.model_copy(update={"phase": "forward", "outputs": (), "flops": 0})
    ops = (*graph.ops[:-1], stray, last.model_copy(update={"index": last.index + 1}))
    assert summarise(graph.model_copy(update={"ops": ops})).micro_batches == summarise(graph).micro_batches == 1


def test_an_empty_graph_has_a_summary() -> None:
    summary = summarise(Graph(resident_bytes=5, signatures=(), ops=(), storages=()))
    assert summary.peak.bytes == 5 and summary.micro_batches == 0 and len(summary.units) == 1


def test_a_summary_is_json() -> None:
    summary = summarise(small_graph(), points=5)
    assert GraphSummary.model_validate_json(summary.model_dump_json()) == summary
    assert max(summary.timeline) == summary.peak.bytes and len(summary.timeline) == 5


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_downsampling_loses_no_peak(values: list[int], points: int) -> None:
    sampled = resampled(values, min(points, len(values)))
    assert max(values[i] for i in sampled) == max(values) and len(set(sampled)) == min(points, len(values))
