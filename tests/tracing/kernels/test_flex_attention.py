import pytest

from autockpt.errors import ConflictError
from autockpt.schema import WorkloadSpec, parse_choice
from autockpt.tracing import Tracer


def test_no_single_op_of_compiled_attention_is_seen() -> None:
    spec = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=250, attn="flex_attention", dtype="bf16")
    with Tracer.from_spec(spec, device="cuda", fallback=False) as tracer, pytest.raises(ConflictError):
        tracer.trace({"model.layers.0": parse_choice("remake")})
