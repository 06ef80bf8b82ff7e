import pytest

from autockpt.errors import ConflictError
from autockpt.schema import WorkloadSpec, parse_choice
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer


def test_flex_attention_keeps_what_the_flash_kernel_keeps() -> None:
    peaks = {}
    for attn in ("sdpa", "flex_attention"):
        spec = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=250, attn=attn, dtype="bf16", packed=True)
        with Tracer.from_spec(spec, hardware=load_hardware("rtx4090"), fallback=False) as tracer:
            for kind in ("save", "recompute"):
                graph = tracer.trace({u.name: parse_choice(kind) for u in tracer.units if u.role == "block"})
                peaks[attn, kind] = graph.peak_bytes
            if attn == "flex_attention":
                assert any("flex_attention" in note for note in tracer.notes)
                with pytest.raises(ConflictError):  # as compiled code, in which no op is seen
                    tracer.trace({"model.layers.0": parse_choice("remake")})
    for kind in ("save", "recompute"):
        assert peaks["flex_attention", kind] == pytest.approx(peaks["sdpa", kind], rel=1e-3)
