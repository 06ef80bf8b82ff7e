"""The recorded op sequence is the one a real eager step runs, and the peak from lifetimes is the allocator's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import Workload, build, from_live
from tests.tracing.reference import ConvNet, Real, additions, mlp, ops_of, same_names, saved_bytes

TRANSFORMERS = ("llama-tiny", "gpt2-tiny", "bert-tiny", "vit-tiny", "t5-tiny", "mixtral-tiny")
MORE = ("bart-tiny", "gemma3-tiny", "mamba-tiny", "qwen3-tiny", "swin-tiny", "resnet-tiny")
# oneDNN's scratch pads are not known; they weigh where activations are a few kilobytes, as in this model.
TOLERANCE = {"resnet-tiny": 0.005}


def uniform(choice: Choice, units: tuple[Unit, ...]) -> dict[str, Choice]:
    return {unit.name: choice for unit in units if unit.role == "block"}


def mixed(units: tuple[Unit, ...]) -> dict[str, Choice]:
    blocks = [unit.name for unit in units if unit.role == "block"]
    return {name: (RECOMPUTE, OFFLOAD, SAVE)[i % 3] for i, name in enumerate(blocks)}


def assert_same(graph: Graph, real: Real, tolerance: float = 0.001) -> None:
    assert graph.source == "ghost"
    assert ops_of(graph) == same_names(real.ops)
    assert_same_bytes(graph, real, tolerance)


def assert_same_bytes(graph: Graph, real: Real, tolerance: float = 0.001) -> None:
    assert graph.resident_bytes == pytest.approx(real.resident_bytes, rel=1e-4)
    assert graph.peak_bytes == pytest.approx(real.peak_bytes, rel=tolerance)


def trace(spec: WorkloadSpec) -> Graph:
    with Tracer.from_spec(spec, fallback=False) as tracer:
        return tracer.trace()


@pytest.mark.parametrize("model", TRANSFORMERS + MORE)
def test_plain_step_of_every_small_model(model: str) -> None:
    spec = WorkloadSpec(model=model)
    graph, real = trace(spec), Real(build(spec))
    assert_same(graph, real, TOLERANCE.get(model, 0.001))
    assert additions(graph) == (real.counts["add_"], real.counts["add"])


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_every_choice_on_every_small_transformer(model: str) -> None:
    spec = WorkloadSpec(model=model)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        plans = uniform(RECOMPUTE, tracer.units), uniform(OFFLOAD, tracer.units), mixed(tracer.units)
        graphs = [tracer.trace(plan) for plan in plans]
    workload = build(spec)
    recompute, *moved = (Real(workload, plan) for plan in plans)
    assert_same(graphs[0], recompute)
    for graph, real in zip(graphs[1:], moved, strict=True):
        assert_same_bytes(graph, real)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 3, "max_grad_norm": 1.0},
        {"autocast": "bf16"},
        {"dtype": "bf16"},
        {"autocast": "fp16", "scaler": True},
        {"lora": 4},
        {"optimizer": "sgd", "packed": True},
        {"optimizer": "none"},
        {"attn": "eager"},
    ],
    ids=lambda s: "-".join(s),
)
@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_training_settings(model: str, settings: dict[str, object]) -> None:
    spec = WorkloadSpec(model=model, **settings)  # type: ignore[arg-type]
    assert_same(trace(spec), Real(build(spec)))


def test_recompute_under_autocast_with_accumulation() -> None:
    spec = WorkloadSpec(model="llama-tiny", autocast="bf16", accumulate=2)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        plan = uniform(RECOMPUTE, tracer.units)
        graph = tracer.trace(plan)
    assert_same(graph, Real(build(spec), plan))


@pytest.mark.parametrize("reentrant", [False, True])
def test_pytorchs_own_recompute(reentrant: bool) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, batch = Stack(), torch.randn(256, 64, requires_grad=True)
    workload = live(model, batch)
    with Tracer.from_workload(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert_same(graph, Real(workload))
    assert any(op.phase == "recompute" for op in graph.ops)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_plain_modules(name: str) -> None:
    torch.manual_seed(0)
    model, batch = (mlp(), torch.randn(256, 64)) if name == "mlp" else (ConvNet(), torch.randn(8, 3, 32, 32))
    workload = live(model, batch)
    with Tracer.from_workload(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert_same(graph, Real(workload))


@pytest.mark.parametrize("model", ["llama-tiny", "t5-tiny", "resnet-tiny"])
def test_saved_tensors_are_those_that_a_real_forward_saves(model: str) -> None:
    spec = WorkloadSpec(model=model)
    graph = trace(spec)
    saved = {storage for op in graph.ops for storage in op.saves}
    assert sum(graph.storages[s].bytes for s in saved) == saved_bytes(build(spec))


def live(model: nn.Module, batch: torch.Tensor) -> Workload:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return from_live(model, batch, step=lambda m, b: m(b).square().mean(), optimizer=optimizer)
