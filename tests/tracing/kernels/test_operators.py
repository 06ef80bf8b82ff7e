from __future__ import annotations

import torch

from autockpt.tracing.kernels.operators import Operator, Operators, count_flops

aten = torch.ops.aten


def test_views_and_writes_are_read_off_the_schema() -> None:
    assert Operator(aten.view.default).view
    assert Operator(aten._unsafe_view.default).view
    assert Operator(aten.split.Tensor).view
    assert not Operator(aten.add.Tensor).view
    assert Operator(aten.add_.Tensor).mutates and Operator(aten.add_.Tensor).returned == ["self"]
    assert Operator(aten.add.out).returned == ["out"]
    assert Operator(aten._foreach_add_.Scalar).mutates and Operator(aten._foreach_add_.Scalar).returned == []
    assert Operator(aten.native_layer_norm.default).returned == [None, None, None]
    assert Operator(aten.t_.default).layout_only


def test_flops_of_products_and_of_the_cpus_attention() -> None:
    operators = Operators()
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    assert count_flops(operators[aten.mm.default], (a, b), {}, a @ b) == 2 * 4 * 8 * 16
    q = torch.ones(2, 4, 8, 16)
    out = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    attention = operators[aten._scaled_dot_product_flash_attention_for_cpu.default]
    assert count_flops(attention, (q, q, q), {}, out) == 2 * (2 * 2 * 4 * 8 * 8 * 16)
    assert count_flops(operators[aten.add.Tensor], (a, a), {}, a) == 0
