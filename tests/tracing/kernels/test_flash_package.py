"""FlashAttention without its package, simulated: as PyTorch's own flash kernel, and refused elsewhere."""

import pytest
import torch

from autockpt.errors import AutockptError
from autockpt.schema.graph import Graph
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.flash_package import FLASH
from autockpt.tracing.kernels.flex_attention import FLEX

pytestmark = pytest.mark.slow


def graph_of(
    attn: str | None, capability: tuple[int, int] = (8, 9), **options: object
) -> tuple[Graph, tuple[str, ...]]:
    spec = WorkloadSpec(**({"model": "llama-tiny", "dtype": "bf16", "attn": attn, "packed": True} | options))
    device = torch.device("cuda")
    with Tracer.from_spec(spec, device=device, fallback=False, capability=capability) as tracer:
        return tracer.trace(), tracer.notes


@pytest.mark.parametrize("attn", (*FLASH, FLEX))
def test_packed_sequences_keep_what_pytorchs_flash_kernel_keeps(attn: str) -> None:
    flash, notes = graph_of(attn)
    assert flash.peak_bytes == pytest.approx(graph_of("sdpa")[0].peak_bytes, rel=1e-3 * (attn == FLEX))  # its blocks
    assert any("_scaled_dot_product_flash_attention" in op.target for op in flash.ops)
    assert any(attn in note and "simulated" in note for note in notes)


def test_padding_takes_copies_and_no_mask() -> None:
    padded, packed = (graph_of("flash_attention_2", packed=packed)[0] for packed in (False, True))
    assert padded.peak_bytes > packed.peak_bytes
    assert not any("efficient_attention" in op.target for op in padded.ops)


def test_refused_where_it_does_not_run() -> None:
    with pytest.raises(AutockptError):
        graph_of("flash_attention_2", capability=(7, 0))
    with pytest.raises(AutockptError):
        Tracer.from_spec(WorkloadSpec(model="llama-tiny", attn="flash_attention_2"), fallback=False)
