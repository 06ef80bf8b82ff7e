from dataclasses import replace
from typing import Any

import pytest

from autockpt.schema.graph import Copy, Graph, Op, Phase, TensorMeta, Unit, Work
from tests.cost.made_up import by_phase, simulated


def op(index: int, *, target: str = "op", phase: Phase = "forward", out: int | None = None, **more: Any) -> Op:
    """An op with a signature of its own; ``out`` is the storage that it makes or writes ``elements`` to."""
    shape = (more.pop("elements", 1),)
    made = () if out is None else (TensorMeta(shape=shape, stride=(1,), dtype="float32", storage=out),)
    given = {"index": index, "target": target, "phase": phase, "module": "", "signature": index, "outputs": made}
    return Op(**given | more)


def graph(phases: str, *, copies=(), owners: str = "") -> Graph:
    """One op per letter (f, r, b, o), each with the signature of its letter; ``owners`` names units by letter."""
    names: dict[str, Phase] = {"f": "forward", "r": "recompute", "b": "backward", "o": "optimizer"}
    owner = [letter.strip() or None for letter in owners.ljust(len(phases))]
    return Graph(
        resident_bytes=100,
        signatures=("f", "r", "b", "o"),
        work=(Work("elements", "add"),) * 4,
        ops=tuple(op(i, phase=names[p], signature="frbo".index(p), unit=owner[i]) for i, p in enumerate(phases)),
        storages=(),
        copies=tuple(copies),
        units=tuple(Unit(name=u, cls="Block", kind=0) for u in "ab"),
    )


SECONDS = {"f": 1.0, "r": 1.5, "b": 2.0, "o": 5.0}


def test_seconds_add_up_by_phase_and_unit():
    s = simulated(graph("ffrbbo", owners="ababa"), SECONDS)
    assert s.step_seconds == pytest.approx(12.5)
    assert by_phase(s) == pytest.approx({"forward": 2.0, "recompute": 1.5, "backward": 4.0, "optimizer": 5.0})
    unit = s.seconds_by_unit["a"]
    assert (unit["forward"], unit["recompute"], unit["backward"], unit["optimizer"]) == (1.0, 1.5, 2.0, 0.0)
    assert s.seconds_by_unit[""]["optimizer"] == 5.0
    assert s.copy_seconds == 0.0


def test_host_time_and_ops_that_run_again():
    """Host time belongs to every op but the optimizer's, whose time is whole already; reruns take longer with both."""
    s = simulated(graph("ffbrbo"), SECONDS, optimizer_seconds=1.0, host_seconds=0.1, rerun_scale=1.5)
    assert by_phase(s)["recompute"] == pytest.approx(1.5 * 1.6)
    assert by_phase(s)["forward"] == pytest.approx(2 * 1.1)
    assert s.step_seconds == pytest.approx(2 * 1.1 + 1.5 * 1.6 + 2 * 2.1 + 1.0)


@pytest.mark.parametrize(
    ("size", "awaited", "wait"),
    [
        (20, 3, 0.0),  # 2 s of copy behind 2 s of compute
        (20, 2, 1.0),  # awaited an op earlier
        (50, 3, 3.0),
        (50, None, 0.0),  # never awaited
        (50, 1, 5.0),  # awaited at once
    ],
)
def test_a_copy_hides_behind_the_compute_before_it_is_awaited(size: int, awaited: int | None, wait: float):
    copies = [Copy(direction="out", bytes=size, issued=1, awaited=awaited)]
    s = simulated(graph("ffff", copies=copies), SECONDS, bandwidth_out=10.0, copy_queues=True)
    assert s.step_seconds == pytest.approx(4.0 + wait)
    assert s.copy_seconds == pytest.approx(wait)


def test_copies_queue_by_direction():
    copies = [
        Copy(direction="out", bytes=20, issued=0, awaited=1),  # 0..2, awaited at 1: waits 1
        Copy(direction="out", bytes=20, issued=0, awaited=2),  # 2..4, awaited at 3: waits 1
        Copy(direction="in", bytes=10, issued=0, awaited=1),  # 0..1 on its own queue
    ]
    s = simulated(graph("fff", copies=copies), SECONDS, bandwidth_out=10.0, bandwidth_in=10.0, copy_queues=True)
    assert s.copy_seconds == pytest.approx(2.0)
    assert s.step_seconds == pytest.approx(5.0)


def test_what_is_sent_to_other_ranks_has_a_queue_of_its_own():
    copies = [
        Copy(direction="ranks", bytes=10, issued=2, awaited=4),  # 1..4: 1 s at least, and 2 s of bytes
        Copy(direction="ranks", bytes=10, issued=3, awaited=4),  # 4..7: the optimizer waits from 5
        Copy(direction="out", bytes=10, issued=0, awaited=1),  # 0..1 beside them
    ]
    rates = {"bandwidth_out": 10.0, "peer_bandwidth": 5.0, "peer_seconds": 1.0}
    s = simulated(graph("fbbbo", copies=copies), SECONDS | {"f": 1.0}, copy_queues=True, **rates)
    assert s.copy_seconds == pytest.approx(9.0 - 7.0)


def test_each_tier_has_a_bandwidth_and_the_disk_one_queue():
    copies = [
        Copy(direction="out", bytes=20, issued=0, awaited=1, tier="disk"),  # 0..2, awaited at 1: waits 1
        Copy(direction="out", bytes=20, issued=0, awaited=1),  # 0..1 beside it
        Copy(direction="in", bytes=10, issued=0, awaited=2, tier="disk"),  # after what is written: 2..4
        Copy(direction="in", bytes=20, issued=0, awaited=2),  # 0..1
    ]
    rates = {"bandwidth_out": 20.0, "bandwidth_in": 20.0, "disk_out": 10.0, "disk_in": 5.0}
    s = simulated(graph("fff", copies=copies), SECONDS, copy_queues=True, **rates)
    assert s.copy_seconds == pytest.approx(1.0 + 1.0)
    inline = simulated(graph("fff", copies=copies), SECONDS, **rates)
    assert inline.copy_seconds == pytest.approx(2.0 + 1.0 + 2.0 + 1.0)
    with pytest.raises(ValueError, match="disk_out_bandwidth must be positive"):
        simulated(graph("fff", copies=copies), SECONDS, bandwidth_out=1.0, bandwidth_in=1.0, disk_in=1.0)


VIEW, GATHER, REDUCE, COPY_IN, COPY_OUT = (
    "aten.view.default",
    "c10d._allgather_base_.default",
    "_c10d_functional.all_reduce.default",
    "fsdp.all_gather_copy_in.default",
    "fsdp.split_with_sizes_copy.default",
)


def of_ranks(*ops: tuple[str, tuple[int, ...], int | None]) -> Graph:
    """Ops as (target, storages that it reads, storage that it makes or writes to)."""
    made = tuple(op(i, target=target, inputs=inputs, out=out) for i, (target, inputs, out) in enumerate(ops))
    texts = tuple(f"{op.target}({op.index})" for op in made)
    kinds = tuple(Work("none" if op.target == VIEW else "elements", op.target) for op in made)
    return Graph(resident_bytes=0, signatures=texts, work=kinds, ops=made, storages=())


def seconds_of(graph: Graph, by_target: dict[str, float]) -> float:
    seconds = {graph.signatures[op.signature]: by_target.get(op.target, 0.0) for op in graph.ops}
    return simulated(graph, seconds, copy_queues=True).step_seconds


@pytest.mark.parametrize(("gather", "expected"), [(2.0, 2 + 3 + 3), (5.0, 5 + 5 + 3)])
def test_a_layer_is_gathered_while_the_one_before_computes(gather: float, expected: float):
    graph = of_ranks(
        (COPY_IN, (0,), 10), (GATHER, (10,), 10), (COPY_OUT, (10, 20), None), ("aten.mm.default", (20,), 30),
        (COPY_IN, (1,), 11), (GATHER, (11,), 11), (COPY_OUT, (11, 21), None), ("aten.mm.default", (30, 21), 31),
    )  # fmt: skip
    assert seconds_of(graph, {GATHER: gather, "aten.mm.default": 3.0}) == pytest.approx(expected)


def test_only_what_touches_a_sum_waits_for_it():
    graph = of_ranks(
        ("aten.mm.default", (0,), 1), (REDUCE, (1,), 2), (VIEW, (2,), 2),
        ("aten.mm.default", (0,), 3), ("aten.mm.default", (2,), 4),
    )  # fmt: skip
    assert seconds_of(graph, {REDUCE: 5.0, "aten.mm.default": 3.0}) == pytest.approx(3 + 5 + 3)


def test_without_streams_a_sum_is_waited_for_at_once_in_recompute_too():
    graph = of_ranks(("aten.mm.default", (0,), 1), (REDUCE, (1,), 2), ("aten.mm.default", (0,), 3))
    again = graph.model_copy(update={"ops": tuple(replace(op, phase="recompute") for op in graph.ops)})
    seconds = {text: 5.0 if text.startswith(REDUCE) else 3.0 for text in graph.signatures}
    assert simulated(graph, seconds).step_seconds == pytest.approx(3 + 5 + 3)
    assert simulated(again, seconds, rerun_scale=2.0).step_seconds == pytest.approx(6 + 5 + 6)


def test_a_sum_is_on_its_way_while_a_copy_is_waited_for():
    products = [("aten.mm.default", (read,), made) for read, made in ((0, 1), (0, 3), (2, 4))]
    graph = of_ranks(products[0], (REDUCE, (1,), 2), *products[1:])
    moved = graph.model_copy(update={"copies": (Copy(direction="in", bytes=10, issued=0, awaited=2),)})
    seconds = {text: 5.0 if text.startswith(REDUCE) else 3.0 for text in graph.signatures}
    found = simulated(moved, seconds, bandwidth_in=1.0, copy_queues=True)
    assert (found.step_seconds, found.copy_seconds) == (3 + 7 + 3 + 3, 7)


def missing_seconds(*work: Work, known: dict[str, float]) -> float:
    """What ops are taken for that were not timed, of those whose work is given."""
    texts = tuple(f"s{i}" for i in range(len(work)))
    ops = tuple(map(op, range(len(work))))
    graph = Graph(resident_bytes=0, signatures=texts, work=work, ops=ops, storages=())
    return simulated(graph, known).step_seconds - sum(known.values())


@pytest.mark.parametrize(("flops", "expected"), [(1000, 6.0), (0, 2.0)])
def test_the_same_op_is_scaled_by_its_flops_or_bytes(flops: int, expected: float):
    """Three times the FLOPs; or twice the bytes."""
    product, larger = (Work("matrix", "mm", flops=n * flops, bytes=size) for n, size in ((1, 800), (3, 1600)))
    other = Work("elements", "add", bytes=440)
    found = missing_seconds(product, larger, other, known={"s0": 2.0 if flops else 1.0, "s2": 9.0})
    assert found == pytest.approx(expected)


def test_another_op_takes_the_median_rate_of_its_kind():
    sizes = {"add": 800, "mul": 800, "exp": 800, "silu": 1600}
    work = (Work("elements", name, bytes=size) for name, size in sizes.items())
    assert missing_seconds(*work, known={"s0": 1.0, "s1": 2.0, "s2": 30.0}) == pytest.approx(2.0 * 2.0)


def test_an_op_that_touches_no_bytes_takes_no_time():
    """Taken for ones that move their bytes, those around offloaded tensors made a plan look 17 times as slow, and
    views of DTensors one four times."""
    assert missing_seconds(Work("elements", "add", bytes=800), Work("none", "set_"), known={"s0": 1.0}) == 0.0
