"""What an op asks of a device, against sums done by hand."""

from __future__ import annotations

import pytest

from autockpt.cost.work import STRIDED_COPY, Work, work_of_op
from autockpt.schema.graph import Op, TensorMeta
from autockpt.tracing.kernels.signature import contiguous_stride


def tensor(dtype: str, *shape: int, storage: int = 9, stride: tuple[int, ...] | None = None) -> TensorMeta:
    return TensorMeta(shape=shape, stride=stride or contiguous_stride(shape), dtype=dtype, storage=storage)


def work(signature: str, *outputs: TensorMeta, flops: int = 0, inputs: tuple[int, ...] = (1, 2, 3)) -> Work:
    op = Op(
        index=0,
        target=signature.partition("(")[0],
        phase="forward",
        module="",
        signature=0,
        flops=flops,
        inputs=inputs,
        outputs=outputs,
    )
    return work_of_op(op, signature)


def test_a_matrix_product() -> None:
    found = work(
        "aten.mm.default(bf16[64,32], bf16[32,128]{1,32})", tensor("bfloat16", 64, 128), flops=2 * 64 * 32 * 128
    )
    assert (found.kind, found.dtype, found.smallest) == ("matrix", "bfloat16", 32)
    assert found.flops == 524288 and found.bytes == 2 * (64 * 32 + 32 * 128 + 64 * 128)


def test_a_product_with_four_bits_makes_the_weight_whole_first() -> None:
    found = work(
        "bitsandbytes.gemm_4bit.default(bf16[4,16,64], u8[4096,1], [128,64], f32[128], 64, 'nf4')",
        tensor("bfloat16", 4, 16, 128),
        flops=2 * 64 * 64 * 128,
    )
    whole = 2 * 128 * 64
    assert (found.kind, found.dtype, found.smallest) == ("matrix", "bfloat16", 64)
    assert found.unpacked == 4096 + 4 * 128 + whole
    assert found.bytes == found.unpacked + whole + 2 * 64 * (64 + 128)


def test_the_bias_of_addmm_is_no_matrix() -> None:
    found = work("aten.addmm.default(f32[1], f32[64,32], f32[32,128])", tensor("float32", 64, 128), flops=1)
    assert found.smallest == 32


def test_views_and_empty_tensors_ask_for_nothing() -> None:
    assert work("aten.view.default(f32[4,4], [16])", tensor("float32", 16, storage=1)).kind == "none"
    assert work("aten.empty_like.default(f32[4,4])", tensor("float32", 4, 4)).kind == "none"


def test_an_op_in_place_is_no_view() -> None:
    found = work("aten.mul_.Tensor(f32[4,4], f32[4,4])", tensor("float32", 4, 4, storage=1))
    assert found.kind == "elements" and found.bytes == 3 * 64


def test_an_addition_costs_the_same_in_place_or_not() -> None:
    text = "aten.add.Tensor(f32[4,8], f32[4,8])"
    fresh, in_place = (work(text, tensor("float32", 4, 8, storage=storage)) for storage in (9, 1))
    assert in_place == fresh
    assert in_place.bytes == 3 * 4 * 32


@pytest.mark.parametrize(
    ("call", "inputs", "passes"),
    [
        ("aten._foreach_mul_.Scalar([f32[8,4]*2], float)", (1, 2), 2),
        ("aten._foreach_lerp_.Scalar([f32[8,4]*2], [f32[8,4]*2], float)", (1, 2, 3, 4), 3),
        ("aten._foreach_addcdiv_.ScalarList([f32[8,4]*2], [f32[8,4]*2], [f32[8,4]*2], [float])", (1, 2, 3, 4, 5, 6), 4),
        # AdamW's second moment: the same gradients twice, which are read once
        ("aten._foreach_addcmul_.Scalar([f32[8,4]*2], [f32[8,4]*2], [f32[8,4]*2], float)", (1, 2, 3, 4, 3, 4), 3),
        ("aten._foreach_sqrt.default([f32[8,4]*2])", (1, 2), 1),  # and what it returns, below
        (f"aten._fused_adamw_.default({', '.join(['[f32[8,4]*2]'] * 4)}, [], [])", tuple(range(8)), 7),
        (f"aten._fused_adamw_.default({', '.join(['[f32[8,4]*2]'] * 4)}, [], [], grad_scale=f32[])", (), 8),
        ("aten._amp_foreach_non_finite_check_and_unscale_.default([f32[8,4]*2], f32[], f32[])", (1, 2, 3, 4), 2),
        ("nowhere.add_.default([f32[8,4]*2])", (1, 2), 1),
    ],
)
def test_what_is_written_into_arguments_is_moved(call: str, inputs: tuple[int, ...], passes: int) -> None:
    assert work(call, inputs=inputs).bytes // (2 * 4 * 32) == passes


def test_an_expanded_tensor_counts_where_it_has_memory() -> None:
    found = work("aten.add.Tensor(f32[8,100], f32[8,100]{0,1})", tensor("float32", 8, 100))
    assert found.bytes == 4 * (800 + 100 + 800) and found.elements == 800


def test_a_lookup_reads_the_rows_that_it_takes() -> None:
    found = work("aten.embedding.default(f32[50000,64], i64[2,10])", tensor("float32", 2, 10, 64))
    assert found.bytes == 2 * 4 * 2 * 10 * 64 + 8 * 20


def test_filling_reads_nothing() -> None:
    assert work("aten.zeros_like.default(f32[100])", tensor("float32", 100)).bytes == 400


def test_an_upcast_moves_both_widths() -> None:
    found = work("aten._to_copy.default(bf16[10,10], dtype=f32)", tensor("float32", 10, 10))
    assert found.bytes == 600 and found.name == "_to_copy"


def test_a_copy_across_memory_is_told_apart() -> None:
    across = "aten.clone.default(f32[2,8,16,4]{512,4,32,1}, memory_format=contiguous_format)"
    assert work(across, tensor("float32", 2, 8, 16, 4)).name == STRIDED_COPY
    same = "aten.clone.default(f32[2,16,8,4], memory_format=contiguous_format)"
    assert work(same, tensor("float32", 2, 16, 8, 4)).name == "clone"


@pytest.mark.parametrize(("suffix", "products"), [("", 2), ("_backward", 5)])
@pytest.mark.parametrize(("causal", "share"), [("True", 0.5), ("False", 1.0)])
def test_attention_has_no_matrix_of_scores(suffix: str, products: int, causal: str, share: float) -> None:
    heads, tokens, width = 8, 512, 64
    qkv = ", ".join(["bf16[1,8,512,64]"] * 3)
    result = tensor("bfloat16", 1, heads, tokens, width)
    found = work(f"attention{suffix}({qkv}, mask=False, causal={causal}, dropout=0.0)", result)
    assert found.kind == "attention" and found.dtype == "bfloat16"
    assert found.flops == share * products * 2 * heads * tokens * tokens * width
    assert found.bytes <= 6 * 2 * heads * tokens * width < 2 * heads * tokens * tokens


def test_a_convolution() -> None:
    signature = "aten.convolution.default(f32[2,3,8,8], f32[16,3,3,3], f32[16], [1*2], [1*2], [1*2], False, [0*2], 1)"
    found = work(signature, tensor("float32", 2, 16, 8, 8), flops=10**6)
    assert found.kind == "matrix" and found.smallest == 16
