"""What kernels take while they run, against the allocator's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.tracing import Tracer
from autockpt.tracing.kernels.operators import Operator, flat_tensors
from autockpt.tracing.kernels.workspaces import trial_of, workspace_bytes
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
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.native_layer_norm_backward.default, (x, x, [32], stats, stats, weight, weight, [True] * 3)),
        (aten.native_layer_norm_backward.default, (x, x, [32], stats, stats, weight, weight, [True, False, False])),
    ]
    for func, args in calls:
        assert known(func, *args) == real_workspace(func, *args), func


def losses(reduction: int) -> list[tuple[Any, tuple[Any, ...]]]:
    x, y, weight = torch.rand(8, 32, 16), torch.rand(8, 32, 16), torch.rand(16)
    grad = x if reduction == 0 else torch.ones(())
    return [
        (aten.mse_loss.default, (x, y, reduction)),
        (aten.smooth_l1_loss.default, (x, y, reduction)),
        (aten.huber_loss.default, (x, y, reduction)),
        (aten.soft_margin_loss_backward.default, (grad, x, y, reduction)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, None, None, reduction)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, weight, weight, reduction)),
    ]


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_hold_what_they_reduce(reduction: int) -> None:
    for func, args in losses(reduction):
        assert known(func, *args) == pytest.approx(real_workspace(func, *args), abs=128), func


def test_losses_on_accelerators_hold_what_they_reduce() -> None:
    def of(func: Any, *args: Any, cuda: bool = True) -> int:
        return workspace_bytes(Operator(func), args, {}, "cuda" if cuda else "other")

    x = torch.rand(8, 32, device="meta")
    assert of(aten.mse_loss.default, x, x) == of(aten.smooth_l1_loss.default, x, x, 2) == x.nbytes
    assert of(aten.mse_loss.default, x, x, 0) == of(aten.mse_loss.default, x, x, cuda=False) == 0
    assert of(aten.mse_loss.default, x.bfloat16(), x.bfloat16()) == x.nbytes // 2
    logits = aten.binary_cross_entropy_with_logits.default
    assert of(logits, x, x, None, None, 1, cuda=False) == 2 * x.nbytes
    assert of(logits, x, x, None, None, 0) == x.nbytes


def test_sums_of_exponentials() -> None:
    rows = torch.rand(64, 32)
    assert known(aten.logsumexp.default, rows, [1]) == real_workspace(aten.logsumexp.default, rows, [1])
    assert known(aten.logsumexp.default, rows, [0, 1]) == real_workspace(aten.logsumexp.default, rows, [0, 1])


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


def convolutions() -> list[tuple[Any, tuple[Any, ...]]]:
    """A depthwise backward takes a hundred times its weights."""
    x, weight = torch.rand(4, 64, 2, 2).to(memory_format=torch.channels_last), torch.rand(64, 1, 7, 7)
    depthwise = [1, 1], [3, 3], [1, 1], False, [0, 0], 64
    image, kernels = torch.rand(8, 16, 16, 16).bfloat16(), torch.rand(32, 16, 3, 3).bfloat16()
    return [
        (aten.convolution_backward.default, (x, x, weight, [64], *depthwise, [True] * 3)),
        (aten.convolution.default, (image, kernels, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_a_convolution_is_called_once(index: int) -> None:
    func, args = convolutions()[index]
    trial = trial_of(Operator(func), func, args)
    assert trial is not None and trial() == real_workspace(func, *args)
    assert trial_of(Operator(aten.mm.default), aten.mm.default, (torch.rand(2, 2), torch.rand(2, 2))) is None


def test_a_convolution_that_is_too_large_is_estimated() -> None:
    x, weight = torch.rand(8, 16, 16, 16), torch.rand(32, 16, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    estimate = workspace_bytes(Operator(aten.convolution.default), args, {})
    assert 0.5 < estimate / real_workspace(aten.convolution.default, *args) < 2


def test_the_peak_of_a_depthwise_network_is_that_of_its_real_step() -> None:
    layers = [nn.Sequential(nn.Conv2d(48, 48, 7, padding=3, groups=48), nn.GELU()) for _ in range(3)]
    batch = torch.rand(2, 48, 3, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    workload = Step(model, batch, loss=lambda m, b: m(b).square().mean())
    with Tracer.from_step(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert graph.source == "ghost" and not graph.notes
    assert graph.peak_bytes == Real(workload).peak_bytes


def test_a_network_too_large_to_try_says_so() -> None:
    layer = nn.Conv2d(512, 512, 3, padding=1)
    batch = torch.empty(64, 512, 40, 40)  # 200 MB that are never touched
    workload = Step(layer, batch, loss=lambda m, b: m(b).sum())
    with Tracer.from_step(workload, fallback=False) as tracer:
        assert any("is estimated" in note for note in tracer.trace().notes)


def test_a_loss_over_classes_copies_what_is_not_contiguous() -> None:
    args = (torch.rand(64, 16).t(), torch.zeros(16).long(), None, 1, -100)
    assert known(aten.nll_loss_forward.default, *args) == real_workspace(aten.nll_loss_forward.default, *args)
