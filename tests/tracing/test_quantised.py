"""Ghost runs of quantised and adapted models: the ops and bytes of real steps on the CPU, and CUDA's by the sources."""

from typing import Any

import pytest

from autockpt.schema.choices import OFFLOAD, RECOMPUTE
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.tracing.reference import Real, ghosts, ops_of, same_names, uniform
from tests.tuning.small import TWO_LAYERS

pytestmark = pytest.mark.slow

INT8: dict[str, Any] = {"quantization": {"load_in_8bit": True}}
BASES: dict[str, dict[str, Any]] = {
    "nf4 twice, bf16": {"load_in_4bit": True, "dtype": "bf16"},
    "nf4 twice, autocast, DoRA": {"load_in_4bit": True, "autocast": "bf16", "lora": {"r": 4, "use_dora": True}},
    "fp4": {
        "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "lora": {"r": 4, "target_modules": "all-linear"},
    },
    "int8": {**INT8, "dtype": "bf16", "lora": {"r": 4, "modules_to_save": ["lm_head"]}},
}


def spec(**options: Any) -> WorkloadSpec:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return WorkloadSpec(**({"model": TWO_LAYERS, "lora": 4, "batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize("options", BASES.values(), ids=BASES)
def test_ops_and_bytes_are_those_of_real_steps(options: dict[str, Any]) -> None:
    wanted = spec(**options)
    with Tracer.from_spec(wanted, fallback=False) as tracer:
        plans = {}, uniform(RECOMPUTE, tracer.units), uniform(OFFLOAD, tracer.units)
        graphs = [tracer.trace(plan) for plan in plans]
    workload = build(wanted)
    for graph, plan in zip(graphs, plans, strict=True):
        real = Real(workload, plan)
        # bitsandbytes' own table of codes is 1 KiB
        assert graph.resident_bytes == pytest.approx(real.resident_bytes, abs=2048)
        assert graph.peak_bytes == pytest.approx(real.peak_bytes, abs=2048)
        if plan is not plans[2]:  # real copies are ops, ghostly ones are not
            assert ops_of(graph) == same_names(real.ops)


def test_a_card_dequantises_the_whole_weight_in_every_product() -> None:
    (graph,) = ghosts(spec(dtype="bf16", load_in_4bit=True), device="cuda", capability=(8, 9))
    products = [op for op in graph.ops if op.target == "bitsandbytes.gemm_4bit.default"]
    during = {product.index: 0 for product in products}
    for storage in graph.storages:
        if storage.birth in during and storage.death == storage.birth:
            during[storage.birth] = storage.bytes
    up = 64 * 176  # numbers in one of llama-tiny's products of the MLP, a table entry for 64 of them
    assert max(during.values()) == 2 * up + 2 * 4 * up // 64
    again = [op for op in graph.ops if op.target == "bitsandbytes.dequantize_4bit.default"]
    assert {op.phase for op in products} == {"forward"} and {op.phase for op in again} == {"backward"}
    assert all(op.flops > 0 for op in products)
    assert any("sources, not measured" in note for note in graph.notes)


def test_a_card_multiplies_in_eight_bits() -> None:
    (graph,) = ghosts(spec(dtype="bf16", **INT8), device="cuda", capability=(8, 9))
    products = [op for op in graph.ops if op.target == "bitsandbytes.int8_mixed_scaled_mm.default"]
    assert products and all(op.flops > 0 for op in products)
    assert any("no activation is taken to be an outlier" in note for note in graph.notes)
