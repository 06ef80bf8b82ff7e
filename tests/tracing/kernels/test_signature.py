from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt.tracing.kernels.signature import (
    Call,
    TensorSpec,
    Word,
    parse_signature,
    signature,
)

aten = torch.ops.aten


def test_attention_is_the_same_on_every_device() -> None:
    q = torch.ones(2, 4, 8, 16)
    lse, empty, n = torch.ones(2, 4, 8), torch.ones(0), torch.zeros(1, dtype=torch.int64)
    forward = {
        signature(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0, True)),
        signature(aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.0, True), {"scale": 0.25}),
        signature(aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, True, 0.0, True)),
        signature(aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, True, 0.0, True)),
    }
    assert forward == {"attention(f32[2,4,8,16], f32[2,4,8,16], f32[2,4,8,16], mask=False, causal=True, dropout=0.0)"}
    cpu = signature(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (q, q, q, q, q, lse, 0.0, True))
    flash = (q, q, q, q, q, lse, None, None, 8, 8, 0.0, True, n, n)
    efficient = (q, q, q, q, empty, q, lse, n, n, 0.0, [True, True, True, False], True)
    assert cpu.startswith("attention_backward(")
    assert cpu == signature(aten._scaled_dot_product_flash_attention_backward.default, flash)
    assert cpu == signature(aten._scaled_dot_product_efficient_attention_backward.default, efficient)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
specs = st.builds(
    lambda dtype, shape, strides: TensorSpec(dtype, shape, tuple(strides[: len(shape)])),
    st.sampled_from(["f32", "bf16", "i64", "b8", "float8_e4m3fn"]),
    shapes,
    st.lists(st.integers(0, 99), min_size=4, max_size=4),
)
leaves = st.one_of(
    specs,
    st.none(),
    st.booleans(),
    st.integers(-99, 99),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.just(Word("float")),
)
values = st.one_of(leaves, st.lists(leaves, max_size=5), st.lists(st.lists(leaves, max_size=3), max_size=3))


def written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(written(item) for item in value)}]"
    return str(value) if isinstance(value, (TensorSpec, Word)) else repr(value)


@given(
    st.lists(values, max_size=5), st.dictionaries(st.sampled_from(["dim", "scale", "out_dtype"]), values, max_size=3)
)
def test_parsing_gives_back_what_was_written(args: list[Any], kwargs: dict[str, Any]) -> None:
    parts = [written(a) for a in args] + [f"{k}={written(v)}" for k, v in kwargs.items()]
    assert parse_signature(f"aten.op.default({', '.join(parts)})") == Call("aten.op.default", args, kwargs)


@pytest.mark.parametrize("text", ["", "aten.mm.default", "aten.mm.default(f32[2]", "a.b.c(1) + d(2)", "a.b.c(float*3)"])
def test_text_that_is_no_signature(text: str) -> None:
    with pytest.raises(ValueError, match="not an op signature"):
        parse_signature(text)
