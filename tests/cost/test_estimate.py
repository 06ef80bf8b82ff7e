from __future__ import annotations

import pytest

from autockpt.schema.graph import Graph, Op, Storage, TensorMeta
from tests.cost.made_up import simulated


def op(index: int, target: str, elements: int, *, flops: int = 0, dtype: str = "float32") -> Op:
    out = TensorMeta(shape=(elements,), stride=(1,), dtype=dtype, storage=0)
    return Op(
        index=index,
        target=target,
        phase="forward",
        module="",
        signature=index,
        flops=flops,
        inputs=(0,),
        outputs=(out,),
    )


def missing_seconds(*ops: Op, known: dict[str, float]) -> float:
    graph = Graph(
        resident_bytes=0,
        signatures=tuple(f"s{o.index}" for o in ops),
        ops=ops,
        storages=(Storage(id=0, bytes=400, birth=0, death=None),),
    )
    return simulated(graph, known).step_seconds - sum(known.values())


@pytest.mark.parametrize(("flops", "expected"), [(1000, 6.0), (0, 2.0)])
def test_the_same_op_is_scaled_by_its_flops_or_bytes(flops: int, expected: float):
    """Three times the FLOPs; or 400 bytes read, and 400 or 1200 written."""
    ops = op(0, "mm", 100, flops=flops), op(1, "mm", 300, flops=3 * flops), op(2, "add", 10)
    assert missing_seconds(*ops, known={"s0": 2.0 if flops else 1.0, "s2": 9.0}) == pytest.approx(expected)


def test_another_op_takes_the_median_rate_of_its_kind():
    ops = op(0, "add", 100), op(1, "mul", 100), op(2, "exp", 100), op(3, "silu", 300)
    assert missing_seconds(*ops, known={"s0": 1.0, "s1": 2.0, "s2": 30.0}) == pytest.approx(2.0 * 2.0)


@pytest.mark.parametrize("target", ("aten.set_.source_Storage", "aten.empty.memory_format", "aten.as_strided.default"))
def test_an_op_that_touches_no_bytes_takes_no_time(target: str):
    """Taken for ones that move their bytes, those around offloaded tensors made a plan look 17 times as slow."""
    assert missing_seconds(op(0, "add", 100), op(1, target, 100), known={"s0": 1.0}) == 0.0
