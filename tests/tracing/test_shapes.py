"""Inferred results against the real kernels', over operators, dtypes and memory layouts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autockpt.tracing.kernels.operators import Operator
from autockpt.tracing.shapes import Shapes, TensorLayout

aten = torch.ops.aten
SHAPES = Shapes()


def strided(kind: str, *shape: int) -> Tensor:
    if kind == "transposed":
        return torch.rand(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if kind == "channels_last":
        return torch.rand(*shape).contiguous(memory_format=torch.channels_last)
    if kind == "sliced":
        return torch.rand(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    if kind == "expanded":
        return torch.rand(1, *shape[1:]).expand(*shape)
    return torch.rand(*shape)


def seen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.untyped_storage().nbytes()
    return [seen(item) for item in value] if isinstance(value, (list, tuple)) else value


def inferred(value: Any) -> Any:
    if isinstance(value, TensorLayout):
        return tuple(value)
    return [inferred(item) for item in value] if isinstance(value, (list, tuple)) else value


def check(func: Any, *args: Any, **kwargs: Any) -> None:
    outcome = SHAPES.infer(func, Operator(func), args, kwargs)
    assert outcome.problem is None
    assert inferred(outcome.tree) == seen(func(*args, **kwargs))


ELEMENTWISE = [
    (aten.add.Tensor, ()),
    (aten.silu_backward.default, ()),
    (aten.gelu_backward.default, ()),
    (aten.threshold_backward.default, (0,)),
    (aten.softplus_backward.default, (1, 20)),
    (aten.hardswish_backward.default, ()),
    (aten.hardtanh_backward.default, (-1, 1)),
    (aten.leaky_relu_backward.default, (0.1, False)),
    (aten.floor_divide.default, ()),
]
KINDS = ["contiguous", "transposed", "sliced", "expanded"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_elementwise_strides(first: str, second: str) -> None:
    for func, rest in ELEMENTWISE:
        check(func, strided(first, 4, 6, 8), strided(second, 4, 6, 8), *rest)
    check(aten.native_dropout_backward.default, strided(first, 4, 6, 8), strided(second, 4, 6, 8) > 0.5, 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str) -> None:
    x, grad = strided(kind, 4, 6, 8), strided("contiguous", 4, 6, 8)
    weight = torch.ones(8)
    check(aten.native_layer_norm.default, x, [8], weight, weight, 1e-5)
    _, mean, deviation = aten.native_layer_norm(x, [8], weight, weight, 1e-5)
    check(aten.native_layer_norm_backward.default, grad, x, [8], mean, deviation, weight, weight, [True] * 3)
    check(aten._softmax.default, x, -1, False)
    check(aten._log_softmax_backward_data.default, x, grad, -1, torch.float32)
    check(aten.roll.default, x, [1, 1], [0, 1])
    check(aten.topk.default, x, 2)
    check(aten.log_sigmoid_forward.default, x)


@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("grad_kind", ["contiguous", "channels_last", "transposed"])
def test_images(kind: str, grad_kind: str) -> None:
    x, grad, weight = strided(kind, 2, 8, 6, 6), strided(grad_kind, 2, 8, 6, 6), torch.ones(8)
    mean, var = torch.zeros(8), torch.ones(8)
    check(aten.native_batch_norm.default, x, weight, weight, mean, var, True, 0.1, 1e-5)
    _, saved, inverse = aten.native_batch_norm(x, weight, weight, mean, var, True, 0.1, 1e-5)
    backward = aten.native_batch_norm_backward.default
    check(backward, grad, x, weight, mean, var, saved, inverse, True, 1e-5, [True] * 3)
    kernel = torch.rand(16, 8, 3, 3)
    check(aten.convolution.default, x, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    if kind != "transposed":  # the real kernel refuses it
        _, mean, inverse = aten.native_group_norm(x, weight, weight, 2, 8, 36, 2, 1e-5)
        check(aten.native_group_norm_backward.default, grad, x, mean, inverse, weight, 2, 8, 36, 2, [True, True, False])


@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_reduced_losses_keep_the_memory_of_the_unreduced(kind: str, reduction: int) -> None:
    x, y = strided(kind, 2, 8, 6, 6), strided("contiguous", 2, 8, 6, 6)
    grad = y if reduction == 0 else torch.ones(())
    for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss):
        check(loss.default, x, y, reduction)
    check(aten.binary_cross_entropy.default, x, y, None, reduction)
    check(aten.binary_cross_entropy_backward.default, grad, x, y, None, reduction)
    check(aten.mse_loss_backward.default, grad, x, y, reduction)
    check(aten.smooth_l1_loss_backward.default, grad, x, y, reduction, 1.0)
    check(aten.huber_loss_backward.default, grad, x, y, reduction, 1.0)
    check(aten.mse_loss.default, x.bfloat16(), y, reduction)
    check(aten.mse_loss_backward.default, grad, x.bfloat16(), y, reduction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_pad_their_rows(dtype: torch.dtype) -> None:
    x = torch.rand(8, 16).to(dtype)
    offsets = torch.tensor([2, 5, 8], dtype=torch.int32)
    weights = torch.rand(3, 20, 16).to(dtype).transpose(1, 2)
    check(aten._grouped_mm.default, x, weights, offsets)
    outcome = SHAPES.infer(aten._grouped_mm.default, Operator(aten._grouped_mm.default), (x, weights, offsets), {})
    assert outcome.flops == 2 * 8 * 16 * 20
