"""Autocast of a ghost run for CUDA casts what CUDA casts, and the CPU's own is back afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.kernels.cuda_autocast import LOWER_PRECISION, PROMOTE, cuda_autocast, overloads
from tests.tracing.kernels.cuda_models import WIDTH
from tests.tracing.reference import ghosts, kept_for_backward

BF16, FP32_TYPE = torch.bfloat16, torch.float32
X, W = torch.rand(4, 8).bfloat16(), torch.rand(8, 8)


# As torch.amp's documentation has them: these, and whatever is a norm, a loss, a sum or product, or resamples.
FP32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus kl_div cumprod "  # noqa: SIM905
    "softmax log_softmax cosine_similarity dist pdist cdist renorm logsumexp cumsum linalg_matrix_sqrth".split()
)
KINDS_IN_FP32 = ("norm", "loss", "upsample", "binary_cross_entropy", "sum", "prod")


def test_every_op_that_cuda_casts_has_its_policy() -> None:
    rest = {name.partition(".")[0] for name in overloads("AutocastCUDA") - LOWER_PRECISION - PROMOTE}
    assert {name for name in rest - FP32 if not any(kind in name for kind in KINDS_IN_FP32)} == set()
    assert overloads("AutocastCUDA") >= PROMOTE and not LOWER_PRECISION & PROMOTE


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: F.layer_norm(X, (8,), W[0], W[0]), FP32_TYPE),
        pytest.param(
            *(lambda: F.rms_norm(X, (8,), W[0]), FP32_TYPE),
            marks=pytest.mark.skipif("rms_norm" not in overloads("AutocastCUDA"), reason="torch 2.11 does not cast it"),
        ),
        (lambda: X.softmax(-1), FP32_TYPE),
        (lambda: F.softmax(X, -1, dtype=BF16), BF16),
        (lambda: F.log_softmax(X, -1), FP32_TYPE),
        (lambda: X.sum(), FP32_TYPE),
        (lambda: X.sum(0, keepdim=True), FP32_TYPE),
        (lambda: X.pow(2), FP32_TYPE),
        (lambda: torch.linalg.vector_norm(X), FP32_TYPE),
        (lambda: X.norm(), FP32_TYPE),
        (lambda: F.cross_entropy(X, torch.zeros(4, dtype=torch.long)), FP32_TYPE),
        (lambda: X.mean(-1), BF16),
        (lambda: F.gelu(X), BF16),
        (lambda: W @ W, BF16),
        (lambda: torch.einsum("ij,kj->ik", W, W), BF16),
        (lambda: torch.mv(W, W[0]), BF16),
        (lambda: torch.addcmul(X, X, W[:4]), FP32_TYPE),
        (lambda: torch.dot(X[0], X[1]), BF16),
        pytest.param(
            *(lambda: torch.trace(X @ X.t()), BF16),  # fp32 on the CPU
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.11."), reason="torch 2.11 has no trace of bfloat16 on the CPU"
            ),
        ),
        (lambda: W.double().exp(), torch.float64),
    ],
)
def test_types_are_those_of_cuda(call: Callable[[], Tensor], dtype: torch.dtype) -> None:
    with cuda_autocast(), torch.autocast("cpu", BF16):
        assert call().dtype is dtype


def test_the_cpu_casts_as_before_afterwards() -> None:
    def types() -> list[torch.dtype]:
        with torch.autocast("cpu", BF16):
            results = F.layer_norm(X, (8,), W[0], W[0]), X.softmax(-1), X.exp(), torch.cat([X, W]), W @ W
            return [result.dtype for result in results]

    before = types()
    with pytest.raises(KeyError), cuda_autocast(), torch.autocast("cpu", BF16):
        assert X.exp().dtype is FP32_TYPE
        raise KeyError
    assert types() == before == [BF16, BF16, BF16, FP32_TYPE, BF16]


def traced(factory: str, device: str, **settings: Any) -> tuple[set[str], int]:
    """Types of what softmax gives in a ghost run, and the bytes that its forward leaves for backward."""
    spec = WorkloadSpec(model=f"tests.tracing.kernels.cuda_models:{factory}", **settings)
    (graph,) = ghosts(spec, device=device)
    types = {out.dtype for op in graph.ops if op.target == "aten._softmax.default" for out in op.outputs}
    return types, sum(s.bytes for s in kept_for_backward(graph))


@pytest.mark.slow
def test_a_ghost_run_for_cuda_saves_what_cuda_saves() -> None:
    """Softmax gives 16 bit on the CPU; on CUDA fp32 for itself and a copy in 16 bit for the product after it."""
    here, there = (traced("gates", device, autocast="bf16") for device in ("cpu", "cuda"))
    assert here[0] == {"bfloat16"} and there[0] == {"float32"}
    assert there[1] - here[1] == pytest.approx(3 * 64 * WIDTH * 4, abs=16)  # the loss is kept, too
    assert traced("gates_under_cuda_autocast", "cuda") == there
