from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autockpt.schema import RECOMPUTE, Graph, WorkloadSpec
from autockpt.tracing import Tracer, run
from autockpt.tracing.kernels.cuda_kernels import (
    AMPERE,
    AttentionCall,
    attention,
    attention_kernel,
    cuda_kernels,
    fused_dropout,
    fuses_dropout,
)
from autockpt.tracing.kernels.operators import Operator
from autockpt.tracing.kernels.workspaces import workspace_bytes
from tests.tracing.kernels.cuda_models import HEADS, LENGTH, WIDTH

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TURING, ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL = (7, 5), (8, 9), (9, 0), (10, 0), (12, 0)


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
        (BF16, {"head": 200}, {}, ADA, "efficient"),  # flash has no backward for it there
        (BF16, {"head": 200}, {}, AMPERE, "flash"),
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


def test_causal_attention_over_a_longer_past_is_not_for_flash() -> None:
    q, k, v = tensors(BF16)
    assert attention_kernel(AttentionCall(q[:, :, :4], k, v, causal=True)) == "efficient"


def test_the_math_kernel_computes_attention() -> None:
    q, k, v = (torch.randn(2, 4, 6, 5, dtype=FP64) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


def test_norms_without_a_fused_kernel_take_the_plain_one() -> None:
    x, weight = torch.randn(2, 4, dtype=torch.bfloat16), torch.ones(4)
    plain = F.rms_norm(x, (4,)), F.rms_norm(x, (4,), weight)
    with cuda_kernels(AMPERE):
        assert all(map(torch.equal, plain, (F.rms_norm(x, (4,)), F.rms_norm(x, (4,), weight))))


def test_everything_is_put_back() -> None:
    before, fused = (F.scaled_dot_product_attention, F.rms_norm, torch.rms_norm), "NativeDropoutBackward0"
    x = torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError), cuda_kernels(AMPERE):
        assert F.scaled_dot_product_attention is not before[0] and nodes(F.dropout(x)) == [fused]
        raise RuntimeError
    assert (F.scaled_dot_product_attention, F.rms_norm, torch.rms_norm) == before
    assert fused not in nodes(F.dropout(x))


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


def traced(factory: str, device: str, capability: tuple[int, int] | None = None, *, recompute: bool = False) -> Graph:
    spec = WorkloadSpec(model=f"tests.tracing.kernels.cuda_models:{factory}")
    with Tracer.from_spec(spec, device=device, capability=capability, fallback=False) as tracer:
        blocks = [u.name for u in tracer.units if u.role == "block"]
        assert len(blocks) == 3
        return tracer.trace(dict.fromkeys(blocks, RECOMPUTE) if recompute else None)


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
def test_recompute_takes_them_again() -> None:
    graph = traced("causal_bf16", "cuda", AMPERE, recompute=True)
    assert count(graph, "_scaled_dot_product_flash_attention") == 6
    again = [op for op in graph.ops if op.phase == "recompute" and "flash" in op.target]
    assert len(again) == 3


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
    saved = [sizes[s] for s in attention_op.saves if s in made]
    assert sorted(n for n in saved if n > 16) == [2 * HEADS * LENGTH * 4, 2 * LENGTH * WIDTH * 2]
    efficient = traced("causal_fp32", "cuda", AMPERE)
    op = next(o for o in efficient.ops if o.target.startswith("aten._scaled_dot_product_efficient_attention."))
    made_sizes = {s.bytes for s in efficient.storages if s.id in {out.storage for out in op.outputs}}
    assert 2 * HEADS * 96 * 4 in made_sizes


@pytest.mark.slow
def test_dropout_saves_a_byte_an_element_and_makes_its_mask_first() -> None:
    graph = traced("causal_fp32", "cuda", AMPERE)
    sizes = {s.id: s.bytes for s in graph.storages}
    ops = [op for op in graph.ops if op.target == "aten.native_dropout.default"]
    assert len(ops) == 3
    for op in ops:
        result, mask = (out.storage for out in op.outputs)
        assert sizes[mask] == 2 * LENGTH * WIDTH
        assert mask < result  # a caching allocator may find another place for it


@pytest.mark.slow
def test_a_mask_is_made_a_bias_in_every_layer() -> None:
    graph = traced("masked_bf16", "cuda", AMPERE)
    bias = [s for s in graph.storages if s.bytes == 2 * LENGTH * LENGTH * 2 and s.birth >= 0]
    assert len(bias) == 3
    ends = {op.index for op in graph.ops if op.target.startswith("aten._scaled_dot_product_efficient_attention_back")}
    assert all(any(s.death is not None and end <= s.death for end in ends) for s in bias)


def workspace(name: str, *args: object, cuda: bool = True) -> int:
    operator = Operator(getattr(torch.ops.aten, name).default)
    return workspace_bytes(operator, args, {}, "cuda" if cuda else "other")


def test_workspaces_of_ops_that_are_put_together_from_others_and_of_kernels() -> None:
    scores = torch.empty(2, HEADS, 64, 32)
    for cuda in (True, False):
        assert workspace("_safe_softmax", scores, -1, cuda=cuda) == scores.numel()
    q = torch.empty(1, 2, 8, 8)
    assert workspace("_scaled_dot_product_efficient_attention_backward", q, q, cuda=False) == 0


def test_workspaces_of_attention_backward() -> None:
    q, k, v = tensors(BF16, head=64, heads=8, shared=2, length=100)
    rows = 2 * 8 * 128
    plain = workspace("_scaled_dot_product_flash_attention_backward", q, q, q, q)
    assert plain == rows * 64 * 4 + rows * 4
    shared = workspace("_scaled_dot_product_flash_attention_backward", q, q, k, v)
    assert shared == plain + 2 * (2 * 8 * 100 * 64 * 2)
    single = torch.empty(2, 8, 100, 64)
    assert workspace("_scaled_dot_product_efficient_attention_backward", single, single) == 2 * 8 * 128 * 4


def test_workspaces_of_embedding_backward() -> None:
    def of(tokens: int, vocabulary: int) -> int:
        return workspace(
            "embedding_dense_backward",
            torch.empty(tokens, 8),
            torch.empty(tokens, dtype=torch.long),
            vocabulary,
            -1,
            False,
        )

    assert of(1000, 50) == 0  # few tokens take another kernel
    assert of(4000, 50) == 4 * 4000 * 8 + (50 + 400) * 8 * 4


def test_the_gpu_at_hand_is_asked_before_the_child_is_made(monkeypatch):
    """The child sees no GPU, and opening a context here would take memory from the search."""
    asked: list[int] = []
    monkeypatch.setattr(run.nvml, "capability", lambda index: asked.append(index) or (9, 0))
    assert run.capability_of(torch.device("cuda", 2)) == (9, 0)
    assert asked == [2]
    monkeypatch.setattr(run.nvml, "capability", lambda index: None)
    assert run.capability_of(torch.device("cuda")) is None
    assert not torch.cuda.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(("known", "count", "said"), [(None, 2, True), ((9, 0), 2, False), (None, 0, False)])
def test_a_capability_that_could_not_be_asked_is_said_on_the_graph(monkeypatch, known, count, said):
    monkeypatch.setattr(run.nvml, "capability", lambda index: known)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with Tracer.from_spec(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8), device="cuda") as tracer:
        assert any("capability 8.0 are assumed" in note for note in tracer.trace().notes) is said
