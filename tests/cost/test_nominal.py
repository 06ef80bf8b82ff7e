"""Rates of common hardware: by what ops read and write, and what mapping large blocks costs a CPU."""

from __future__ import annotations

import pytest

from autockpt.cost.roofline import nominal_op_times
from autockpt.schema import Graph, Op, Storage
from autockpt.schema.graph import TensorMeta
from tests.cost.test_host import environment


def graph_of(*calls: tuple[str, str, tuple[int, ...]]) -> Graph:
    """Ops with these targets, signatures and shapes of results, all of which read one storage of 1 GB."""
    ops = tuple(
        Op(
            index=i,
            target=target,
            phase="forward",
            module="",
            signature=i,
            inputs=(0,),
            outputs=(TensorMeta(shape=shape, stride=(shape[-1], 1), dtype="float32", storage=1),),
        )
        for i, (target, _, shape) in enumerate(calls)
    )
    storage = Storage(id=0, bytes=10**9, birth=-1, death=None)
    texts = tuple(text for _, text, _ in calls)
    return Graph(source="ghost", resident_bytes=10**9, ops=ops, storages=(storage,), signatures=texts, units=())


def seconds(kind: str, rows: int, target: str = "aten.tanh.default") -> float:
    text = f"{target}(f32[{rows},1024])"
    times = nominal_op_times(environment(kind), graph_of((target, text, (rows, 1024))))
    return times.seconds[text]


def test_a_part_of_a_storage_costs_what_it_is() -> None:
    assert seconds("cuda", 1000) == pytest.approx(2 * seconds("cuda", 500), rel=0.01)


def test_large_blocks_are_mapped_anew_on_a_cpu() -> None:
    small, large = seconds("cpu", 8192), seconds("cpu", 8193)  # up to 32 MiB, and beyond
    assert large > 2 * small
    assert seconds("cuda", 8193) < 1.01 * seconds("cuda", 8192)
