"""Rates of common hardware: by what ops read and write, and what mapping large blocks costs a CPU."""

from __future__ import annotations

import pytest

from autockpt.cost.roofline import nominal_op_times
from autockpt.schema import Graph, Op
from autockpt.schema.graph import TensorMeta
from tests.cost.test_host import environment


def seconds(kind: str, rows: int) -> float:
    """Of one op that reads and writes so many rows."""
    made = TensorMeta(shape=(rows, 1024), stride=(1024, 1), dtype="float32", storage=1)
    op = Op(index=0, target="aten.tanh.default", phase="forward", module="", signature=0, inputs=(0,), outputs=(made,))
    text = f"aten.tanh.default(f32[{rows},1024])"
    graph = Graph(resident_bytes=0, ops=(op,), storages=(), signatures=(text,))
    return nominal_op_times(environment(kind), graph).seconds[text]


def test_large_blocks_are_mapped_anew_on_a_cpu() -> None:
    small, large = seconds("cpu", 8192), seconds("cpu", 8193)  # up to 32 MiB, and beyond
    assert large > 2 * small
    assert seconds("cuda", 8193) < 1.01 * seconds("cuda", 8192)
    assert seconds("cuda", 1000) == pytest.approx(2 * seconds("cuda", 500), rel=0.01)
