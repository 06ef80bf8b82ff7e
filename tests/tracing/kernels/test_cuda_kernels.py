import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autockpt.schema import Graph, WorkloadSpec, parse_choice
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.cuda_kernels import AMPERE, AttentionCall, attention_kernel, fused_dropout, fuses_dropout
from tests.tracing.kernels.cuda_models import HEADS, LENGTH, WIDTH
from tests.tracing.reference import ghosts, kept_for_backward

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TURING, HOPPER, BLACKWELL, CONSUMER_BLACKWELL = (7, 5), (9, 0), (10, 0), (12, 0)


def tensors(dtype: torch.dtype, head: int = 64, heads: int = 8, shared: int = 8, length: int = 16):
    def make(h: int) -> torch.Tensor:
        return torch.empty(2, h, length, head, dtype=dtype, requires_grad=True)

    return make(heads), make(shared), make(shared)


@pytest.mark.parametrize(
    ("dtype", "given", "call", "capability", "kernel"),
    [
        (BF16, {}, {"causal": True}, AMPERE, "flash"),
        (FP16, {}, {"dropout": 0.1}, AMPERE, "flash"),
        (BF16, {}, {"mask": True}, AMPERE, "efficient"),
        (FP32, {}, {"causal": True}, AMPERE, "efficient"),
        (FP64, {}, {}, AMPERE, "math"),
        (FP16, {}, {}, TURING, "efficient"),
        (BF16, {}, {}, TURING, "math"),
        (BF16, {}, {}, HOPPER, "cudnn"),
        (BF16, {}, {"mask": True}, BLACKWELL, "cudnn"),
        (BF16, {}, {}, CONSUMER_BLACKWELL, "flash"),
        (BF16, {"head": 256}, {}, HOPPER, "flash"),
        (BF16, {"head": 264}, {}, AMPERE, "efficient"),
        (BF16, {"head": 100}, {}, AMPERE, "flash"),  # padded
        (FP32, {"head": 30}, {}, AMPERE, "math"),
        (BF16, {"shared": 2}, {"gqa": True}, AMPERE, "flash"),
        (BF16, {"shared": 2}, {"gqa": True, "mask": True}, AMPERE, "math"),
        (BF16, {"shared": 2}, {}, AMPERE, "math"),
    ],
)
def test_the_kernel_that_cuda_takes(dtype, given, call, capability, kernel) -> None:
    q, k, v = tensors(dtype, **given)
    mask = torch.ones(16, 16, dtype=torch.bool) if call.pop("mask", False) else None
    assert attention_kernel(AttentionCall(q, k, v, mask, **call), capability) == kernel


def nodes(tensor: Tensor) -> list[str]:
    """Names of the autograd nodes that a tensor comes from, leaves aside."""
    seen, todo = [], [tensor.grad_fn]
    while todo:
        if (node := todo.pop()) is not None and node.next_functions:
            seen.append(node.name())
            todo += [before for before, _ in node.next_functions]
    return seen


def test_dropout_is_one_kernel_wherever_it_is_called_from() -> None:
    q = torch.randn(2, 4, 6, 5, dtype=FP64, requires_grad=True)
    cell = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with fused_dropout():
        assert "NativeDropoutBackward0" in nodes(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
        assert "NativeDropoutBackward0" in nodes(cell(torch.randn(3, 2, 4))[0])
        assert F.dropout(q, 0.0) is q and F.dropout(q, 0.5, training=False) is q
        assert not F.dropout(q, 1.0).any()
    assert fuses_dropout("cuda") and fuses_dropout("xpu") and not fuses_dropout("cpu")


def traced(factory: str, device: str, capability: tuple[int, int] | None = None) -> Graph:
    spec = WorkloadSpec(model=f"tests.tracing.kernels.cuda_models:{factory}")
    return ghosts(spec, device=device, capability=capability)[0]


def count(graph: Graph, target: str) -> int:
    return sum(op.target.startswith(f"aten.{target}.") for op in graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "capability", "kernel"),
    [
        ("causal_bf16", AMPERE, "_scaled_dot_product_flash_attention"),
        ("causal_bf16", HOPPER, "_scaled_dot_product_cudnn_attention"),
        ("causal_fp32", AMPERE, "_scaled_dot_product_efficient_attention"),
        ("masked_bf16", AMPERE, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_a_step_for_cuda_takes_its_kernels_in_both_directions(factory, capability, kernel) -> None:
    graph = traced(factory, "cuda", capability)
    assert count(graph, kernel) == count(graph, f"{kernel}_backward") == 3
    assert count(graph, "native_layer_norm") == count(graph, "native_layer_norm_backward") == 3  # for rms_norm
    assert not count(graph, "_scaled_dot_product_flash_attention_for_cpu")
    assert not count(graph, "_safe_softmax")
    assert sum(op.flops for op in graph.ops if op.target.startswith(f"aten.{kernel}")) > 0


@pytest.mark.slow
def test_what_attention_saves() -> None:
    """Score matrices with dropout on the CPU; row sums in fp32 under flash, per 32 rows under the efficient kernel."""
    scores = 2 * HEADS * LENGTH * LENGTH
    cpu = [s.bytes for s in traced("causal_fp32", "cpu").storages]
    assert cpu.count(scores * 4) >= 3
    flash = traced("causal_bf16", "cuda", AMPERE)
    attention_op = next(op for op in flash.ops if op.target.startswith("aten._scaled_dot_product_flash_attention."))
    sizes = {s.id: s.bytes for s in flash.storages}
    assert scores * 2 not in sizes.values() and scores * 4 not in sizes.values()
    made = {out.storage for out in attention_op.outputs}
    saved = [s.bytes for s in kept_for_backward(flash) if s.id in made]
    assert sorted(n for n in saved if n > 16) == [2 * HEADS * LENGTH * 4, 2 * LENGTH * WIDTH * 2]
    efficient = traced("causal_fp32", "cuda", AMPERE)
    op = next(o for o in efficient.ops if o.target.startswith("aten._scaled_dot_product_efficient_attention."))
    made_sizes = {s.bytes for s in efficient.storages if s.id in {out.storage for out in op.outputs}}
    assert 2 * HEADS * 96 * 4 in made_sizes


@pytest.mark.slow
def test_dropout_saves_a_byte_an_element_and_its_mask_first() -> None:
    graph = traced("causal_fp32", "cuda", AMPERE)
    sizes = {s.id: s.bytes for s in graph.storages}
    ops = [op for op in graph.ops if op.target == "aten.native_dropout.default"]
    assert len(ops) == 3
    for op in ops:
        result, mask = (out.storage for out in op.outputs)
        assert sizes[mask] == 2 * LENGTH * WIDTH
        assert mask < result  # a caching allocator may find another place for it


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])  # by the flash kernel, and with a mask by the memory-efficient one
def test_attention_whose_output_is_kept_does_not_run_again(packed: bool) -> None:
    spec = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=32, dtype="bf16", packed=packed)
    with Tracer.from_spec(spec, device="cuda", capability=AMPERE, fallback=False) as tracer:
        blocks = [unit.name for unit in tracer.units if unit.role == "block"]
        again = {}
        for kind in ("recompute", "keep_attention", "selective"):
            ops = tracer.trace(dict.fromkeys(blocks, parse_choice(kind))).ops
            again[kind] = sum("attention" in op.target for op in ops if op.phase == "recompute")
    assert again == {"recompute": len(blocks), "keep_attention": 0, "selective": 0}
