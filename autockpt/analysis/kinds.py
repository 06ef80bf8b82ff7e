"""What sort of op made a storage: the words in which people think about activations."""

from __future__ import annotations

import re

from autockpt.schema import Graph, Op

OTHER = "other"
OFFLOADED = "brought back"
UNMADE = "random state"  # what a choice notes down outside of ops: the generators' states
MATRIX, ATTENTION, NORM, ACTIVATION = "matrix product", "attention", "norm", "activation function"
DROPOUT, CAST, MASK, ELEMENTWISE = "dropout", "cast", "mask", "elementwise"
RESIDUAL, COPY, LOSS, EMBEDDING = "residual sum", "copy or reshape", "loss", "embedding"

# by the op's own name, `_backward` and the in-place underscore taken off
_BY_NAME: dict[str, str] = {
    MATRIX: """mm addmm bmm baddbmm addbmm matmul linear mv addmv dot einsum _grouped_mm _scaled_mm _int_mm
        _addmm_activation gemm_4bit gemv_4bit int8_linear_matmul int8_scaled_mm int8_mixed_scaled_mm""",
    "convolution": """convolution _convolution conv1d conv2d conv3d cudnn_convolution mkldnn_convolution im2col col2im
        _slow_conv2d_forward _conv_depthwise2d""",
    NORM: """native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm _fused_rms_norm rms_norm
        layer_norm batch_norm group_norm rsqrt linalg_vector_norm var_mean _native_batch_norm_legit
        batch_norm_with_update miopen_batch_norm""",
    ACTIVATION: """gelu silu relu tanh sigmoid leaky_relu elu selu celu mish hardswish hardtanh hardsigmoid softplus
        glu threshold prelu _prelu_kernel log_sigmoid_forward erf log_sigmoid""",
    DROPOUT: "native_dropout dropout bernoulli _fused_dropout rand rand_like alpha_dropout",
    CAST: "_to_copy to type_as",
    "quantisation": """quantize_4bit dequantize_4bit quantize_blockwise dequantize_blockwise int8_vectorwise_quant
        int8_vectorwise_dequant int8_double_quant int8_mm_dequant""",
    MASK: """where masked_fill le lt ge gt eq ne bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or
        logical_not logical_xor tril triu isin any all arange ones_like new_ones full full_like new_full ones
        zeros_like scalar_tensor isnan isinf isfinite floor_divide remainder fmod""",
    ELEMENTWISE: """add mul sub rsub div neg pow sqrt exp expm1 log log1p abs clamp clamp_min clamp_max reciprocal cos
        sin sign sgn maximum minimum square addcmul addcdiv lerp round floor ceil trunc exp2 atan polar""",
    "reduction": """sum mean amax amin max min prod logsumexp var std norm count_nonzero avg_pool2d
        max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d argmax argmin adaptive_avg_pool2d
        adaptive_avg_pool1d""",
    "scan": "cumsum cumprod _cumsum segment_reduce logcumsumexp",
    "softmax": "_softmax softmax _safe_softmax _softmax_backward_data",
    LOSS: """_log_softmax _log_softmax_backward_data log_softmax nll_loss nll_loss_forward nll_loss2d
        nll_loss2d_forward mse_loss smooth_l1_loss huber_loss cross_entropy_loss binary_cross_entropy
        binary_cross_entropy_with_logits _ctc_loss kl_div l1_loss soft_margin_loss""",
    EMBEDDING: "embedding embedding_dense _embedding_bag embedding_renorm",
    "routing": """topk sort argsort histc bincount one_hot _unique2 unique_dim nonzero searchsorted bucketize
        repeat_interleave""",
    COPY: """clone cat stack copy contiguous slice select index index_put _index_put_impl index_add index_select
        index_copy gather scatter scatter_add constant_pad_nd repeat new_zeros new_empty empty empty_like
        empty_strided new_empty_strided zeros fill zero roll flip select_scatter slice_scatter as_strided
        as_strided_scatter unfold diagonal masked_scatter masked_select pixel_shuffle pixel_unshuffle
        upsample_nearest2d reflection_pad1d upsample_bilinear2d upsample_bicubic2d take_along_dim tile expand view
        reshape permute transpose t detach alias lift_fresh lift_fresh_copy _unsafe_view unsqueeze squeeze diag_embed
        resize set chunk split split_with_sizes unbind _reshape_copy view_as_real value_selecting_reduction trapezoid
        scatter_reduce index_reduce constant_pad""",
}
_KIND = {name: kind for kind, names in _BY_NAME.items() for name in names.split()}
_ALLOCATORS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros")
)
_FUSED = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flash_attn", "flex_attention")
_NORM_MODULE = re.compile(r"norm|layer_?norm|(^|_)ln(_|\d|$)|(^|_)bn\d*$")
_ACTIVATION_MODULE = re.compile(r"^(act|act_fn|activation|activation_fn|intermediate_act_fn|act\d|gelu|relu|silu)$")


class OpKinds:
    """Sorts the ops of one graph into kinds, by name and by the module that they ran in."""

    def __init__(self, graph: Graph) -> None:
        self._blocks = {u.name for u in graph.blocks()}
        self._attention = tuple(f"{u.name}." for u in graph.units if u.role == "attention")
        self._known: dict[tuple[str, str], str] = {}

    def of(self, op: Op) -> str:
        """The kind of op. ``other`` only for ops that no table knows."""
        key = (op.target, op.module)
        if key not in self._known:
            self._known[key] = self._find(op)
        return self._known[key]

    def _find(self, op: Op) -> str:
        name = base_name(op.target)
        kind = _KIND.get(name, OTHER)
        last = op.module.rpartition(".")[2].lower()
        if any(part in op.target for part in _FUSED):
            return ATTENTION
        if kind in (ELEMENTWISE, "reduction", CAST) and _NORM_MODULE.search(last):
            return NORM
        if kind == ELEMENTWISE and _ACTIVATION_MODULE.search(last):
            return ACTIVATION
        if name in ("bmm", "baddbmm", "_softmax", "softmax", "_safe_softmax", "_softmax_backward_data", "matmul"):
            # scores and what they weigh; the projections are matrix products like any other
            return ATTENTION if f"{op.module}.".startswith(self._attention) and self._attention else kind
        return RESIDUAL if name == "add" and op.module in self._blocks else kind


def base_name(target: str) -> str:
    """``aten.native_layer_norm_backward.default`` -> ``native_layer_norm``; ``aten.add_.Tensor`` -> ``add``."""
    name = target.split(".")[1] if target.count(".") else target
    if name in _KIND:
        return name
    return name.removesuffix("_").removesuffix("_backward").removesuffix("_overrideable")


def makers(graph: Graph) -> dict[int, Op]:
    """The op that made the contents of each storage of the cycle: not the one that only reserved its memory."""
    found: dict[int, Op] = {}
    born = {s.id: s.birth for s in graph.storages}
    for op in graph.ops:
        for out in op.outputs:
            known = found.get(out.storage)
            if known is None:
                if born.get(out.storage) == op.index:
                    found[out.storage] = op
            elif base_name(known.target) in _ALLOCATORS and _writes(op):
                found[out.storage] = op
    return found


def _writes(op: Op) -> bool:
    """Whether an op changes its first argument in place."""
    return op.target.count(".") > 0 and op.target.split(".")[1].endswith("_")


def within(module: str, unit: str | None) -> str:
    """A module's name without its unit's in front."""
    return module.removeprefix(unit).lstrip(".") if unit and module.startswith(unit) else module
