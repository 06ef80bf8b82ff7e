"""What kernels take while they run, against the allocator's events."""

from typing import Any

import pytest
import torch
from torch import nn

from autockpt.tracing import Tracer
from autockpt.tracing.kernels.operators import Operator, flat_tensors
from autockpt.tracing.kernels.workspaces import workspace_bytes
from autockpt.workload import Step
from tests.tracing.reference import Real, peak_over

aten = torch.ops.aten


def real_workspace(func: Any, *args: Any) -> int:
    """Most bytes held during the call beyond its results."""
    results: list[Any] = []
    func(*args)
    most = peak_over(lambda: results.append(func(*args)))
    return most - sum({t.data_ptr(): t.untyped_storage().nbytes() for t in flat_tensors(results)}.values())


def known(func: Any, *args: Any) -> int:
    return workspace_bytes(Operator(func), args, {}, threads=torch.get_num_threads())


def test_other_kernels() -> None:
    weight, stats = torch.ones(32), torch.ones(32)
    image = torch.rand(8, 32, 16, 16)
    batch_norm = (image, image, weight, stats, stats, stats, stats, True, 1e-5, [True] * 3)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.native_batch_norm_backward.default, batch_norm),
        (aten.native_layer_norm.default, (torch.rand(64, 32, 64).transpose(1, 2), [32], weight, weight, 1e-5)),
        (aten._safe_softmax.default, (torch.rand(64, 8, 32), -1)),
        (aten.embedding_dense_backward.default, (torch.rand(32, 64).t(), torch.zeros(64).long(), 9, -1, False)),
    ]
    for func, args in calls:
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=1024), func


def test_matrices_without_a_leading_dimension_are_copied() -> None:
    a, b, gaps = torch.rand(64, 96), torch.rand(96, 32), torch.rand(64, 192)[:, ::2]
    of_sum = torch.ones(()).expand(64, 96)  # as the gradient of logits.sum()
    calls: list[tuple[Any, tuple[Any, ...], int]] = [
        (aten.mm.default, (of_sum, b), of_sum.nbytes),
        (aten.mm.default, (b.t(), of_sum.t()), of_sum.nbytes),
        (aten.addmm.default, (torch.rand(32), gaps, b), gaps.nbytes),
        (aten.mm.default, (a[:, :48], b[:48]), 0),
        (aten.mm.default, (b.t(), a.t()), 0),
    ]
    for func, args, copied in calls:
        assert known(func, *args) == real_workspace(func, *args) == copied
    for sparse in (a.to_sparse(), a.to_sparse_csr()):  # of a graph's adjacency: another library's product
        assert known(aten.mm.default, sparse, b) == 0
    batched = (of_sum.expand(2, 64, 96), b.expand(2, 96, 32))
    assert workspace_bytes(Operator(aten.bmm.default), batched, {}, "cuda") == batched[0].nbytes


def test_operands_of_other_types_are_copied() -> None:
    f = torch.rand(4, 8, 16)
    h, i, b, row = f.bfloat16(), f.long(), f > 0.5, torch.rand(16)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.add.Tensor, (f, h)),
        (aten.add.Tensor, (h, row)),
        (aten.mul.Tensor, (row.bfloat16(), f)),
        (aten.mul.Tensor, (h, i)),
        (aten.mul.Tensor, (f, b)),
        (aten.add.Tensor, (i, b)),
        (aten.lt.Tensor, (f, h)),
        (aten.where.self, (b, f, h)),
        (aten.addcmul.default, (f, h, h)),
        (aten.masked_fill.Scalar, (f, b, 0.0)),
        (aten.mul.Tensor, (h, torch.tensor(2.0))),
        (aten._log_softmax_backward_data.default, (f.transpose(0, 1), f.transpose(0, 1), -1, torch.float32)),
        (aten._softmax.default, (f.transpose(0, 1), -1, False)),
    ]
    for func, args in calls:
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=64), func
    assert known(aten.add.Tensor, f, h) == f.nbytes


@pytest.mark.parametrize("lengths", [(40, 24), (200, 100), (70, 600)])
def test_attention_works_block_by_block(lengths: tuple[int, int]) -> None:
    q, k = (torch.rand(2, 3, length, 16) for length in lengths)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert known(forward, q, k, k) == real_workspace(forward, q, k, k)
    out, lse = forward(q, k, k)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for grad in (torch.rand(q.shape), torch.rand(q.transpose(1, 2).shape).transpose(1, 2)):
        args = (grad, q, k, k, out, lse, 0.0, False)
        assert known(backward, *args) == real_workspace(backward, *args)


def losses(reduction: int) -> list[tuple[Any, tuple[Any, ...]]]:
    x, y, weight = torch.rand(8, 32, 16), torch.rand(8, 32, 16), torch.rand(16)
    return [
        (aten.mse_loss.default, (x, y, reduction)),
        (aten.smooth_l1_loss.default, (x, y, reduction)),
        (aten.huber_loss.default, (x, y, reduction)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, None, None, reduction)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, weight, weight, reduction)),
    ]


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_hold_what_they_reduce(reduction: int) -> None:
    for func, args in losses(reduction):
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=128), func


def test_the_peak_of_a_depthwise_network_is_the_real_one() -> None:
    layers = [nn.Sequential(nn.Conv2d(48, 48, 7, padding=3, groups=48), nn.GELU()) for _ in range(3)]
    batch = torch.rand(2, 48, 3, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    workload = Step(model, batch, loss=lambda m, b: m(b).square().mean())
    with Tracer.from_step(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert graph.source == "ghost" and not graph.notes
    assert graph.peak_bytes == Real(workload).peak_bytes
