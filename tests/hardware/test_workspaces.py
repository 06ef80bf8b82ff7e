"""What kernels take while they run, against the allocator's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autockpt.hardware.accelerator_workspaces import accelerator_workspace_bytes
from autockpt.hardware.operators import Operator, flat_tensors
from autockpt.hardware.scratch import is_measured, measured_bytes
from autockpt.hardware.signature import plain_signature
from autockpt.hardware.workspaces import workspace_bytes
from tests.tracing.reference import peak_over

aten = torch.ops.aten


def real_workspace(func: Any, *args: Any) -> int:
    """Most bytes held during the call beyond its results."""
    results: list[Any] = []
    func(*args)
    most = peak_over(lambda: results.append(func(*args)))
    return most - sum({t.data_ptr(): t.untyped_storage().nbytes() for t in flat_tensors(results)}.values())


def known(func: Any, *args: Any) -> int:
    """By a rule, or by a trial of the op."""
    operator, threads = Operator(func), torch.get_num_threads()
    if is_measured(operator, flat_tensors(args)):
        return measured_bytes([plain_signature(func, args)], threads)[plain_signature(func, args)]
    return workspace_bytes(operator, args, {}, threads)


def test_other_kernels() -> None:
    weight, stats = torch.ones(32), torch.ones(32)
    image = torch.rand(8, 32, 16, 16)
    batch_norm = (image, image, weight, stats, stats, stats, stats, True, 1e-5, [True] * 3)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.native_batch_norm_backward.default, batch_norm),
        (aten.native_layer_norm.default, (torch.rand(64, 32, 64).transpose(1, 2), [32], weight, weight, 1e-5)),
        (aten._safe_softmax.default, (torch.rand(64, 8, 32), -1)),
        (aten.roll.default, (image, [1, 1], [2, 3])),
        (aten.roll.default, (image, [1], [2])),
        (aten.embedding_dense_backward.default, (torch.rand(32, 64).t(), torch.zeros(64).long(), 9, -1, False)),
    ]
    for func, args in calls:
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=1024), func


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
        (aten.sum.dim_IntList, (h, [0])),
        (aten._log_softmax_backward_data.default, (f.transpose(0, 1), f.transpose(0, 1), -1, torch.float32)),
        (aten._softmax.default, (f.transpose(0, 1), -1, False)),
    ]
    for func, args in calls:
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=64), func
    assert known(aten.add.Tensor, f, h) == f.nbytes


def test_results_in_place_of_a_narrower_type_are_computed_beside() -> None:
    narrow, wide = torch.rand(64, 8).bfloat16(), torch.rand(64, 8)
    assert known(aten.add_.Tensor, narrow, wide) == peak_over(lambda: narrow.add_(wide)) == 2 * wide.nbytes
    assert known(aten.add_.Tensor, wide, narrow) == peak_over(lambda: wide.add_(narrow)) == wide.nbytes


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


def test_gradients_of_norms() -> None:
    x, weight, stats = torch.rand(6, 5, 32), torch.ones(32), torch.ones(6, 5, 1)
    channels, group = torch.ones(5), torch.ones(6, 1)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.native_layer_norm_backward.default, (x, x, [32], stats, stats, weight, weight, [True] * 3)),
        (aten.native_layer_norm_backward.default, (x, x, [32], stats, stats, weight, weight, [True, False, False])),
        (aten.native_group_norm_backward.default, (x, x, group, group, channels, 6, 5, 32, 1, [True] * 3)),
    ]
    for func, args in calls:
        assert known(func, *args) == real_workspace(func, *args), func


def losses(dtype: torch.dtype, reduction: int) -> list[tuple[Any, tuple[Any, ...]]]:
    x, y, weight = torch.rand(8, 32, 16).to(dtype), torch.rand(8, 32, 16).to(dtype), torch.rand(16).to(dtype)
    grad = x if reduction == 0 else torch.ones((), dtype=dtype)
    return [
        (aten.mse_loss.default, (x, y, reduction)),
        (aten.mse_loss_backward.default, (grad, x, y, reduction)),
        (aten.smooth_l1_loss.default, (x, y, reduction)),
        (aten.huber_loss.default, (x, y, reduction)),
        (aten.soft_margin_loss.default, (x, y, reduction)),
        (aten.soft_margin_loss_backward.default, (grad, x, y, reduction)),
        (aten.binary_cross_entropy.default, (x, y, None, reduction)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, None, None, reduction)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, weight, weight, reduction)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_hold_what_they_reduce(dtype: torch.dtype, reduction: int) -> None:
    for func, args in losses(dtype, reduction):
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=128), func


def test_losses_of_two_types_copy_the_narrower_one() -> None:
    wide, narrow = torch.rand(8, 32, 16), torch.rand(8, 32, 16).bfloat16()
    one = torch.ones(())
    for x, y in ((wide, narrow), (narrow, wide)):
        for reduction in (0, 1, 2):
            func: Any = aten.mse_loss.default
            assert known(func, x, y, reduction) == pytest.approx(real_workspace(func, x, y, reduction), abs=64)
        backward: tuple[Any, ...] = (one, x, y, 1)
        assert known(aten.mse_loss_backward.default, *backward) == real_workspace(
            aten.mse_loss_backward.default, *backward
        )


def test_losses_on_accelerators_hold_what_they_reduce() -> None:
    def of(func: Any, *args: Any, cuda: bool = True) -> int:
        return accelerator_workspace_bytes(Operator(func), args, {}, cuda)

    x = torch.rand(8, 32, device="meta")
    assert of(aten.mse_loss.default, x, x) == of(aten.smooth_l1_loss.default, x, x, 2) == x.nbytes
    assert of(aten.mse_loss.default, x, x, 0) == of(aten.mse_loss.default, x, x, cuda=False) == 0
    assert of(aten.mse_loss.default, x.bfloat16(), x.bfloat16()) == x.nbytes // 2
    logits = aten.binary_cross_entropy_with_logits.default
    assert of(logits, x, x, None, None, 1, cuda=False) == 2 * x.nbytes
    assert of(logits, x, x, None, None, 0) == x.nbytes


def test_16_bit_reductions_add_up_in_fp32() -> None:
    x = torch.rand(4, 8, 16, 2).bfloat16()
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.mean.default, (x,)),
        (aten.mean.dim, (x, [-1])),
        (aten.mean.dim, (x, [0, 2], True)),
        (aten.sum.default, (x,)),
        (aten.sum.default, (x.transpose(1, 2),)),
        (aten.sum.dim_IntList, (x, [0, 1])),
        (aten.sum.dim_IntList, (x, [0, 2, 3])),
        (aten.gather.default, (x, 1, torch.zeros(4, 3, 16, 2).long())),
        (aten.gather.default, (torch.rand(16).bfloat16(), 0, torch.zeros(64).long())),
        (aten.scatter.src, (x, 1, torch.zeros(4, 3, 16, 2).long(), x)),
    ]
    for func, args in calls:
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=64), func
    rows = torch.rand(64, 32)
    assert known(aten.logsumexp.default, rows, [1]) == real_workspace(aten.logsumexp.default, rows, [1])
    assert known(aten.logsumexp.default, rows, [0, 1]) == real_workspace(aten.logsumexp.default, rows, [0, 1])
    distances = aten._euclidean_dist.default
    assert known(distances, rows, rows[:40]) == real_workspace(distances, rows, rows[:40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_with_channels_first_or_last(dtype: torch.dtype) -> None:
    first, weight = torch.rand(8, 32, 16, 16).to(dtype), torch.ones(32, dtype=dtype)
    last = first.contiguous(memory_format=torch.channels_last)
    backward = aten.native_batch_norm_backward.default
    for grad, x in ((first, first), (first, last), (last, first), (last, last)):
        args = (grad, x, weight, weight, weight, weight, weight, True, 1e-5, [True] * 3)
        assert known(backward, *args) == pytest.approx(real_workspace(backward, *args), abs=256)


def test_a_number_of_a_wider_type_decides_the_type() -> None:
    mask, number = torch.rand(8, 32) > 0.5, torch.tensor(2.0)
    assert known(aten.mul.Tensor, mask, number) == real_workspace(aten.mul.Tensor, mask, number) == 4 * 8 * 32


def test_most_kernels_need_none() -> None:
    x: Tensor = torch.rand(8, 8)
    assert known(aten.mm.default, x, x) == known(aten.native_layer_norm.default, x, [8], None, None, 1e-5) == 0


def test_scatter_add_of_16_bit_types_adds_up_in_fp32() -> None:
    for dtype, nbytes in ((torch.float32, 0), (torch.bfloat16, 4 * 8 * 4)):
        x = torch.zeros(4, 8, dtype=dtype)
        assert known(aten.scatter_add_.default, x, 1, torch.zeros(4, 2, dtype=torch.long), x[:, :2]) == nbytes


def test_a_convolution_that_is_too_large_to_try_is_estimated() -> None:
    x, weight = torch.rand(8, 16, 16, 16), torch.rand(32, 16, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    estimate = workspace_bytes(Operator(aten.convolution.default), args, {})
    assert 0.5 < estimate / real_workspace(aten.convolution.default, *args) < 2


def test_a_loss_over_classes_copies_what_is_not_contiguous() -> None:
    args = (torch.rand(64, 16).t(), torch.zeros(16).long(), None, 1, -100)
    assert known(aten.nll_loss_forward.default, *args) == real_workspace(aten.nll_loss_forward.default, *args)
