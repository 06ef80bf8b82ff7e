"""Op times from a description: by hand, in proportion, and beside measurements that others have published."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.cost.roofline import (
    REGION_OPS,
    nominal_op_times,
    roofline_times,
    seconds_of_work,
    two_clocks,
    waits_for_host,
)
from autockpt.cost.simulation import simulate
from autockpt.schema import Graph, Op, WorkloadSpec
from autockpt.schema.graph import TensorMeta, Work
from autockpt.schema.hardware import Hardware
from autockpt.shipped import load_hardware
from tests.cost.made_up import by_phase
from tests.samples import environment
from tests.tracing.reference import ghosts

LLAMA = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=64)


def card(**changes: Any) -> Hardware:
    plain = {
        "name": "card",
        "kind": "cuda",
        "memory_bytes": 2**34,
        "context_bytes": 0,
        "vector_flops": 1e13,
        "matrix_flops": {"float32": 1e13, "bfloat16": 1e14},
        "bandwidth": 1e12,
        "launch_seconds": 1e-5,
        "link_out": 2e10,
        "link_in": 1e10,
        "efficiency": {"matrix": 0.5, "attention": 0.25, "attention_backward": 0.2, "bandwidth": 0.8, "link": 0.5},
    }
    return Hardware.model_validate(plain | changes)


def product(n: int, dtype: str = "bfloat16") -> Work:
    return Work("matrix", "mm", dtype, 2.0 * n**3, 6.0 * n * n, n * n, n)


def test_a_matrix_product_by_hand() -> None:
    # 2·4096³ FLOPs at half of 100 TFLOP/s; 100 MB at 0.8 TB/s take less
    assert seconds_of_work(card(), product(4096)) == pytest.approx(2 * 4096**3 / 5e13)
    # 2·32³ FLOPs take 1.3 ns, 6 KB take 7.7 ns
    assert seconds_of_work(card(), product(32)) == pytest.approx(6 * 32 * 32 / 8e11)
    skinny = card(efficiency=card().efficiency.model_dump() | {"half_size": 4096.0, "matrix_seconds": 1e-4})
    assert seconds_of_work(skinny, product(4096)) == pytest.approx(1e-4 + 2 * 2 * 4096**3 / 5e13)


def test_single_kernels_by_hand() -> None:
    add = Work("elements", "add", "float32", 0.0, 8e9, 10**9)
    assert seconds_of_work(card(), add) == pytest.approx(0.01)
    slow = card(element_rates={"bernoulli_": 1e9})
    assert seconds_of_work(slow, Work("elements", "bernoulli_", "float32", 0.0, 8e9, 10**9)) == pytest.approx(1.0)
    assert seconds_of_work(card(), Work("none", "view")) == 0.0
    assert seconds_of_work(card(kernel_seconds=2e-6), Work("elements", "add", bytes=4.0)) == 2e-6


# TFLOP/s of the largest products with torch (torch-performance-test-data, ml-engineering): the roofline's at n = 10240
LARGEST = (
    ("rtx3090", "bfloat16", 76.6),
    ("rtx4090", "bfloat16", 165.3),
    ("rtx5090", "float32", 68.4),
    ("a100-80", "bfloat16", 264.5),
    ("a100-80", "float32", 19.2),
    ("l40s", "bfloat16", 269.2),
    ("h100", "bfloat16", 794.5),
    ("h100", "float32", 52.0),
    ("b200", "bfloat16", 1696.0),
    ("t4", "float16", 41.9),
    ("t4", "float32", 4.35),
    ("mi300x", "bfloat16", 668.4),
    ("m4-max", "bfloat16", 13.2),
    ("m4-max", "float32", 13.8),
)


@pytest.mark.parametrize(("name", "dtype", "rate"), LARGEST)
def test_the_largest_products_reach_what_was_measured(name: str, dtype: str, rate: float) -> None:
    described = load_hardware(name)
    alone = described.model_copy(update={"efficiency": described.efficiency.model_copy(update={"sustained": 1.0})})
    said = 2.0 * 10240**3 / seconds_of_work(alone, product(10240, dtype)) / 1e12
    assert said == pytest.approx(rate, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_two_clocks_are_what_a_queue_does(ops: list[tuple[float, float]]) -> None:
    host = device = 0.0
    for on_device, on_host in ops:
        host += on_host
        device = max(device, host) + on_device
    said = two_clocks(np.array([d for d, _ in ops]), np.array([h for _, h in ops]))
    assert said == pytest.approx(max(host, device))


@pytest.mark.parametrize("spec", [LLAMA, WorkloadSpec(model="resnet-tiny", batch_size=2)], ids=["llama", "batch norms"])
def test_recomputing_costs_its_ops_and_its_regions(spec: WorkloadSpec) -> None:
    save, recompute = ghosts(spec, "save", "recompute")
    cpu = load_hardware("cpu")
    times = roofline_times(cpu, (save, recompute))
    again = by_phase(simulate(recompute, times))["recompute"]
    plain = simulate(recompute, times.model_copy(update={"rerun_scale": 1.0}))
    regions = len(save.blocks())
    extra = again - by_phase(plain)["recompute"]
    assert extra == pytest.approx(regions * REGION_OPS * cpu.launch_seconds, rel=0.01)


def test_ranks_talk_by_the_link_that_is_described() -> None:
    sent = Work("link", "all_reduce", bytes=1e9)
    share = card().efficiency.link
    by_host = seconds_of_work(card(), sent)
    assert by_host == pytest.approx(card().peer_seconds + 1e9 / (min(card().link_in, card().link_out) * share))
    fast = card(peer_bandwidth=4.5e11, peer_seconds=1e-5)
    assert seconds_of_work(fast, sent) == pytest.approx(1e-5 + 1e9 / (4.5e11 * share))


def test_a_step_that_waits_for_its_host_says_what_hosts_make_of_it() -> None:
    (graph,) = ghosts(LLAMA)
    waiting = waits_for_host(load_hardware("h100"), graph)
    assert len(waiting) == 1 and "8 µs" in waiting[0] and "40" in waiting[0]
    slow = load_hardware("h100").model_copy(update={"launch_seconds": 40e-6})
    repeated = ghosts(LLAMA.model_copy(update={"accumulate": 6}), "save", "recompute")
    for graph in repeated:  # all micro-batches count, and what recomputed regions take
        found = re.search(r"([0-9.]+) ms at 40 µs", waits_for_host(load_hardware("h100"), graph)[0])
        took = simulate(graph, roofline_times(slow, repeated)).step_seconds
        assert found is not None and float(found[1]) / 1e3 == pytest.approx(took, rel=0.2)
    assert waits_for_host(load_hardware("h100").model_copy(update={"launch_seconds": 1e-8}), graph) == []
    assert waits_for_host(load_hardware("cpu"), graph) == []


def test_an_optimizer_costs_a_launch_per_group_or_per_parameter() -> None:
    def seconds(name: str, *, tensors: int, ops: int) -> float:
        graph = Graph(
            resident_bytes=0,
            signatures=(name,),
            work=(Work("elements", name, bytes=1.0, tensors=tensors),),
            ops=tuple(Op(index=i, target=name, phase="optimizer", module="", signature=0) for i in range(ops)),
            storages=(),
        )
        return roofline_times(card(kernel_seconds=2e-6), [graph]).optimizer_seconds

    assert seconds("mul_", tensors=1, ops=72) == pytest.approx(72e-5)
    assert seconds("_foreach_mul_", tensors=72, ops=1) == pytest.approx(2e-5)
    assert seconds("_local_scalar_dense", tensors=1, ops=72) == 0.0  # the number of the step, on the host


def test_products_in_a_step_keep_a_share_of_what_they_reach_alone() -> None:
    alone = card(efficiency=card().efficiency.model_dump() | {"half_size_of": {"float32": 0.0}})
    sustained = card(efficiency=alone.efficiency.model_dump() | {"sustained": 0.5})
    for dtype, share in (("bfloat16", 0.5), ("float32", 1.0)):
        assert alone.efficiency.of_matrix(dtype) * share == sustained.efficiency.of_matrix(dtype)


def nominal_seconds(kind: str, rows: int) -> float:
    """On common hardware, of one op that reads and writes so many rows."""
    made = TensorMeta(shape=(rows, 1024), stride=(1024, 1), dtype="float32", storage=1)
    op = Op(index=0, target="aten.tanh.default", phase="forward", module="", signature=0, inputs=(0,), outputs=(made,))
    work = Work("elements", "tanh", bytes=2.0 * 4 * 1024 * rows)
    graph = Graph(resident_bytes=0, ops=(op,), storages=(), signatures=("tanh",), work=(work,))
    return nominal_op_times(environment(kind), [graph]).seconds["tanh"]


def test_large_blocks_are_mapped_anew_on_a_cpu() -> None:
    small, large = nominal_seconds("cpu", 8192), nominal_seconds("cpu", 8193)  # up to 32 MiB, and beyond
    assert large > 2 * small
    assert nominal_seconds("cuda", 8193) < 1.01 * nominal_seconds("cuda", 8192)
    assert nominal_seconds("cuda", 1000) == pytest.approx(2 * nominal_seconds("cuda", 500), rel=0.01)
