"""The recorded op sequence is the one a real eager step runs, and the peak from lifetimes is the allocator's."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Remake, Segment
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import Step, build
from tests.tracing.reference import Real, additions, ghosts, mlp, ops_of, same_names, uniform

pytestmark = pytest.mark.slow

TRANSFORMERS = ("llama-tiny", "gpt2-tiny", "t5-tiny", "mixtral-tiny")
MORE = ("vit-tiny", "bart-tiny", "gemma3-tiny", "mamba-tiny", "qwen3-tiny", "swin-tiny", "resnet-tiny")


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


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_small_transformers_plain_and_with_every_choice(model: str) -> None:
    spec = WorkloadSpec(model=model)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        remade = uniform(Remake(keep=("**",)), tracer.units)
        plans = {}, uniform(RECOMPUTE, tracer.units), mixed(tracer.units), remade
        graphs = [tracer.trace(plan) for plan in plans]
    workload = build(spec)
    plain, recompute, moved, remake = (Real(workload, plan) for plan in plans)
    assert_same(graphs[0], plain)
    assert additions(graphs[0]) == (plain.counts["add_"], plain.counts["add"])
    assert_same(graphs[1], recompute)
    assert_same_bytes(graphs[2], moved)  # real copies are ops, ghostly ones are not
    assert_same(graphs[3], remake, tolerance=0.003)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        *((model, {}) for model in MORE),
        ("gpt2-tiny", {"accumulate": 2, "max_grad_norm": 1.0, "autocast": "bf16"}),
        ("bert-tiny", {"dtype": "bf16"}),
        ("llama-tiny", {"autocast": "fp16", "scaler": True}),
        ("llama-tiny", {"lora": 4}),
        ("llama-tiny", {"optimizer": "sgd", "packed": True}),
        ("gpt2-tiny", {"attn": "eager", "optimizer": "none"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_further_models_and_training_settings(model: str, settings: dict[str, object]) -> None:
    spec = WorkloadSpec(model=model, **settings)  # type: ignore[arg-type]
    (graph,), real = ghosts(spec), Real(build(spec))
    assert_same(graph, real)
    assert additions(graph) == (real.counts["add_"], real.counts["add"])


@pytest.mark.parametrize("model", ["vit-tiny", "llama-tiny"])
def test_layers_that_run_under_a_mode_of_their_own(model: str) -> None:
    """Keeping outputs takes a dispatch mode around a layer; its sums after products are not fused because of that."""
    spec = WorkloadSpec(model=model)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        plan = uniform("selective", tracer.units)
        graph = tracer.trace(plan)
    assert_same_bytes(graph, Real(build(spec), plan), tolerance=1e-6)


@pytest.mark.parametrize(
    ("model", "mixes"),
    [
        ("llama-tiny", [[Segment(size=size)] * 4 for size in (2, 3, 4)]),
        ("gpt2-tiny", [[SAVE, Segment(), Segment(), OFFLOAD], [Segment(), Segment(), RECOMPUTE, Segment(size=3)]]),
    ],
)
def test_segments_of_several_layers(model: str, mixes: list[list[Choice]]) -> None:
    spec = WorkloadSpec(model=model)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        names = [unit.name for unit in tracer.units if unit.role == "block"]
        plans = [dict(zip(names, mix, strict=True)) for mix in mixes]
        tracer.trace(plans[0])  # whatever is made once and kept
        graphs = [tracer.trace(plan) for plan in plans]
    workload = build(spec)
    for plan, graph in zip(plans, graphs, strict=True):
        same = assert_same_bytes if OFFLOAD in plan.values() else assert_same
        same(graph, Real(workload, plan), 1e-4)
    if model == "llama-tiny":
        assert graphs[0].peak_bytes < graphs[1].peak_bytes < graphs[2].peak_bytes
        forward, again = (
            Counter(op.unit for op in graphs[-1].ops if op.phase == phase and op.flops)
            for phase in ("forward", "recompute")
        )
        # every op that runs again is its unit's; the last unit does not need its last product
        assert again == {name: forward[name] - (name == names[-1]) for name in names}


@pytest.mark.parametrize("reentrant", [False, True])
def test_pytorchs_own_recompute(reentrant: bool) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    workload = live(Stack(), torch.randn(256, 64))
    with Tracer.from_step(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert_same(graph, Real(workload))
    assert any(op.phase == "recompute" for op in graph.ops)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
def test_losses_over_a_large_output(loss: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Upsample(scale_factor=2), nn.Sigmoid())
    batch = torch.rand(2, 3, 32, 32), torch.rand(2, 8, 64, 64)
    workload = Step(model, batch, loss=lambda m, b: getattr(nn.functional, loss)(m(b[0]), b[1]))
    with Tracer.from_step(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert graph.peak_bytes == pytest.approx(Real(workload).peak_bytes, abs=16)


def live(model: nn.Module, batch: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Step(model, batch, loss=lambda m, b: m(b).square().mean(), optimizer=optimizer)
