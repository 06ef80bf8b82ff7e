"""Liger Kernel's kernels in ghost runs and under every choice; on a CPU their arithmetic is done by PyTorch."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, choice_kinds
from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.tracing.tracer import trace
from autockpt.workload import Step, build, discover_units
from autockpt.workload.build import apply_liger
from tests.liger import launched
from tests.policies.zoo import assert_equal
from tests.tracing.reference import Real, uniform
from tests.tracing.test_accuracy import assert_same_bytes

pytestmark = pytest.mark.slow

SPEC = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for package in ("triton", "liger_kernel"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import transformers.models.llama.modeling_llama as llama
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(llama, name, getattr(llama, name))  # Liger replaces them for good
    monkeypatch.setattr(JITFunction, "run", launched)
    yield


def step() -> Step:
    workload = build(SPEC)
    apply_liger(workload.model)
    workload.spec = None
    return workload


def gradients(workload: Step, choices: Mapping[str, Choice]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with attach(workload.model, choices, sentinels="off"):
        for i in range(2):
            found[f"{i} loss"] = workload.forward_backward()
            found |= {f"{i} {n}": p.grad.clone() for n, p in workload.model.named_parameters() if p.grad is not None}
            assert workload.optimizer is not None
            workload.optimizer.step()
            workload.release_gradients()
    return found


def test_gradients_are_those_of_plain_training(kernels: None) -> None:
    wanted = gradients(step(), {})
    usual = gradients(build(SPEC), {})
    assert all(torch.allclose(wanted[name], usual[name], atol=1e-5) for name in usual)
    for kind in (*choice_kinds("block"), {"kind": "selective", "keep": ["self_attn.q_proj", "mlp.up_proj"]}):
        workload = step()
        choices = uniform(kind, discover_units(workload.model))
        if kind == "remake":
            with pytest.raises(ConflictError):
                gradients(workload, choices)
        else:
            assert_equal(gradients(workload, choices), wanted)


def test_bytes_are_those_of_real_steps(kernels: None) -> None:
    for kind in ("save", "recompute", "selective"):
        workload = step()
        for _ in range(2):
            workload.cycle()
        choices = uniform(kind, discover_units(workload.model))
        graph = trace(workload, choices)
        assert graph.source == "ghost" and any("not launched" in note for note in graph.notes)
        assert_same_bytes(graph, Real(workload, choices))


def test_a_simulated_card_makes_no_logits(kernels: None) -> None:
    spec = SPEC.model_copy(update={"liger": True, "dtype": "bf16", "seq_len": 512, "packed": True})
    with Tracer.from_spec(spec, hardware=load_hardware("rtx4090"), fallback=False) as tracer:
        graph = tracer.trace()
    logits = 2 * 512 * 256 * 2
    made = [s for s in graph.storages if s.birth >= 0 and graph.ops[s.birth].phase != "optimizer" and s.unit is None]
    largest = max(storage.bytes for storage in made)
    assert tracer.settings["liger"] and any(op.target.startswith("autockpt.triton_kernel") for op in graph.ops)
    assert largest < logits, largest
