"""What an op asks of a device, against sums done by hand."""

from __future__ import annotations

import pytest

from autockpt.cost.work import Work, work_of_op
from autockpt.schema.graph import Op, TensorMeta
from autockpt.tracing.kernels.signature import contiguous_stride


def tensor(dtype: str, *shape: int, storage: int = 9) -> TensorMeta:
    return TensorMeta(shape=shape, stride=contiguous_stride(shape), dtype=dtype, storage=storage)


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


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        ("c10d._allgather_base_.default(f32[800], f32[100], ranks8, False)", 700),
        ("c10d._reduce_scatter_base_.default(f32[200], f32[800], ranks4, ScriptObject, False)", 600),
        ("c10d.allreduce_.default([f32[800]], ranks2, ScriptObject, None, False)", 800),
        ("_c10d_functional.all_reduce.default(f32[800], 'sum', ranks4)", 1200),
        ("_c10d_functional.all_gather_into_tensor.default(f32[100], 8, ranks8)", 700),  # of what it returns
    ],
)
def test_a_rank_sends_all_but_its_own_share(call: str, sent: int) -> None:
    found = work(call, tensor("float32", 800))
    assert (found.kind, found.bytes) == ("link", 4 * sent)
