"""What an op asks of a device, against sums done by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autockpt.schema.graph import Work
from autockpt.tracing.kernels import work as rules
from autockpt.tracing.kernels.operators import Operator, flat_tensors
from autockpt.tracing.kernels.signature import signature

aten = torch.ops.aten
SCALES = [torch.empty(8, 4), torch.empty(8, 4)]
ONE = torch.empty(())


def work(func: Any, *args: Any, made: tuple[Tensor, ...] = (), flops: int = 0, text: str = "", **kwargs: Any) -> Work:
    """Of a call that returned ``made``; ``text`` is its signature where that cannot be had."""
    operator, tensors = Operator(func), flat_tensors([*args, *kwargs.values()])
    text = text or signature(func, args, kwargs)
    return rules.work_of(operator, text, operator.arguments(args, kwargs), tensors, list(made), flops)


def test_a_matrix_product() -> None:
    a, b = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(128, 32, dtype=torch.bfloat16).t()
    found = work(aten.mm.default, a, b, made=(a @ b,), flops=2 * 64 * 32 * 128)
    assert (found.kind, found.dtype, found.smallest) == ("matrix", "bfloat16", 32)
    assert found.flops == 524288 and found.bytes == 2 * (64 * 32 + 32 * 128 + 64 * 128)


def test_an_addition_costs_the_same_in_place_or_not() -> None:
    a, b = torch.empty(4, 8), torch.empty(4, 8)
    fresh, in_place = work(aten.add.Tensor, a, b, made=(a + b,)), work(aten.add_.Tensor, a, b, made=(a.detach(),))
    assert in_place == fresh
    assert in_place.bytes == 3 * 4 * 32


@pytest.mark.parametrize(
    ("func", "args", "made"),
    [
        (aten.view.default, (SCALES[0], [32]), SCALES[0].view(32)),
        (aten.set_.source_Tensor, (SCALES[0], SCALES[1]), SCALES[0]),
        (aten.empty.memory_format, ([8, 4],), SCALES[0]),
        (aten.as_strided.default, (SCALES[0], [4], [1]), SCALES[0][0]),
    ],
)
def test_some_ops_touch_no_bytes(func: Any, args: tuple[Any, ...], made: Tensor) -> None:
    assert work(func, *args, made=(made,)).kind == "none"


def lists(count: int) -> list[list[Tensor]]:
    """So many lists of two tensors."""
    return [[torch.empty(8, 4), torch.empty(8, 4)] for _ in range(count)]


@pytest.mark.parametrize(
    ("func", "args", "passes"),
    [
        (aten._foreach_mul_.Scalar, (*lists(1), 2.0), 2),
        (aten._foreach_lerp_.Scalar, (*lists(2), 2.0), 3),
        (aten._foreach_addcdiv_.ScalarList, (*lists(3), [2.0]), 4),
        # AdamW's second moment: the same gradients twice, which are read once
        (aten._foreach_addcmul_.Scalar, (*lists(1), SCALES, SCALES, 2.0), 3),
        (aten._foreach_sqrt.default, lists(1), 1),  # and what it returns, which is not given here
        (aten._fused_adamw_.default, (*lists(4), [], []), 7),
        (aten._amp_foreach_non_finite_check_and_unscale_.default, (*lists(1), ONE, ONE), 2),
    ],
)
def test_what_is_written_into_arguments_is_moved(func: Any, args: tuple[Any, ...], passes: int) -> None:
    assert work(func, *args).bytes // (2 * 4 * 32) == passes


def test_a_fused_optimizer_writes_to_gradients_only_to_unscale_them() -> None:
    assert work(aten._fused_adamw_.default, *lists(4), [], [], grad_scale=ONE).bytes // (2 * 4 * 32) == 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_has_no_matrix_of_scores(backward: bool, causal: bool) -> None:
    heads, tokens, width = 8, 512, 64
    q, k, v, grad = (torch.empty(1, heads, tokens, width, dtype=torch.bfloat16) for _ in range(4))
    func, args = aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, causal)
    if backward:
        func = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        args = (grad, q, k, v, v, torch.empty(1, heads, tokens), 0.0, causal)
    found = work(func, *args, made=(torch.empty_like(q),))
    assert found.kind == "attention" and found.dtype == "bfloat16"
    assert found.flops == (0.5 if causal else 1.0) * (5 if backward else 2) * 2 * heads * tokens * tokens * width
    assert found.bytes <= 6 * 2 * heads * tokens * width < 2 * heads * tokens * tokens


@pytest.mark.parametrize(
    ("name", "sizes", "ranks", "sent"),
    [
        ("c10d._allgather_base_", (800, 100), 8, 700),
        ("c10d._reduce_scatter_base_", (200, 800), 4, 600),
        ("c10d.allreduce_", (800,), 2, 800),
        ("_c10d_functional.all_reduce", (800,), 4, 1200),
        ("_c10d_functional.all_gather_into_tensor", (100,), 8, 700),  # of what it returns
    ],
)
def test_a_rank_sends_all_but_its_own_share(
    name: str, sizes: tuple[int, ...], ranks: int, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "ranks_of", lambda argument: ranks)
    namespace, packet = name.split(".")
    func = getattr(getattr(torch.ops, namespace), packet).default
    found = work(func, *map(torch.empty, sizes), made=(torch.empty(800),), text=f"{func}()")
    assert (found.kind, found.bytes) == ("link", 4 * sent)
