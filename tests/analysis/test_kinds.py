from __future__ import annotations

import pytest

from autockpt.analysis.kinds import OTHER, OpKinds, base_name, makers
from autockpt.schema import Graph, Op, Storage, Unit
from autockpt.schema.graph import TensorMeta

UNITS = (
    Unit(name="h.0", cls="Block", kind=0),
    Unit(name="h.0.attn", cls="Attention", kind=1, role="attention", parent="h.0"),
)


def op(target: str, module: str = "", index: int = 0, out: int | None = None) -> Op:
    outputs = () if out is None else (TensorMeta(shape=(2,), stride=(1,), dtype="f32", storage=out),)
    return Op(index=index, target=target, phase="forward", module=module, unit=None, signature=0, outputs=outputs)


def graph(*ops: Op, storages: tuple[Storage, ...] = ()) -> Graph:
    return Graph(resident_bytes=0, signatures=("x",), ops=ops, storages=storages, units=UNITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "module", "kind"),
    [
        ("aten.mm.default", "h.0.attn.q_proj", "matrix product"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "h.0.attn", "attention"),
        ("aten.bmm.default", "h.0.attn", "attention"),
        ("aten.bmm.default", "h.0.experts", "matrix product"),
        ("aten._softmax.default", "h.0.router", "softmax"),
        ("aten.mul.Tensor", "h.0.input_layernorm", "norm"),
        ("aten.mul.Tensor", "h.0.ln_1", "norm"),
        ("aten.native_layer_norm_backward.default", "h.0.x", "norm"),
        ("aten.silu_backward.default", "h.0.mlp", "activation function"),
        ("aten.mul.Tensor", "h.0.mlp.act", "activation function"),
        ("aten.mul.Tensor", "h.0.mlp", "elementwise"),
        ("aten.add.Tensor", "h.0", "residual sum"),
        ("aten.add_.Tensor", "h.0.mlp", "elementwise"),
        ("aten.native_dropout.default", "h.0.drop", "dropout"),
        ("aten.bernoulli_.float", "h.0.drop", "dropout"),
        ("aten._to_copy.default", "h.0.mlp", "cast"),
        ("aten.where.self", "", "mask"),
        ("aten.embedding_dense_backward.default", "emb", "embedding"),
        ("aten._log_softmax_backward_data.default", "", "loss"),
        ("aten.convolution_backward.default", "stem", "convolution"),
        ("aten.slice_backward.default", "h.0.attn", "copy or reshape"),
        ("bitsandbytes.gemm_4bit.default", "h.0.mlp.up_proj", "matrix product"),
        ("bitsandbytes.dequantize_4bit.default", "h.0.mlp.up_proj", "quantisation"),
        ("mine.secret.default", "h.0", OTHER),
    ],
)
def test_ops_have_the_kind_that_people_call_them_by(target: str, module: str, kind: str) -> None:
    assert OpKinds(graph()).of(op(target, module)) == kind


def test_names_lose_overload_direction_and_underscore() -> None:
    assert base_name("aten.gelu_backward.default") == "gelu"
    assert base_name("aten.add_.Tensor") == "add"
    assert base_name("prims.foo") == "foo" and base_name("bare") == "bare"


def test_memory_that_is_filled_later_belongs_to_the_op_that_fills_it() -> None:
    ops = (
        op("aten.empty_like.default", index=0, out=7),
        op("aten.bernoulli_.float", index=1, out=7),
        op("aten.div_.Scalar", index=2, out=7),
        op("aten.mm.default", index=3, out=8),
        op("aten.add_.Tensor", index=4, out=8),
    )
    storages = tuple(Storage(id=i, bytes=8, birth=birth, death=None) for i, birth in ((7, 0), (8, 3)))
    found = makers(graph(*ops, storages=storages))
    assert found[7].target == "aten.bernoulli_.float", "the first to fill it"
    assert found[8].target == "aten.mm.default", "what is changed later keeps its maker"
