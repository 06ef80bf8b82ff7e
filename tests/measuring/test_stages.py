"""A stage alone has the bytes of that stage in torch's pipelines (two processes, gloo), and its gradients by a plan."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import autockpt
from autockpt.devices.cpu import allocator_peak
from autockpt.schema.choices import parse_choice
from autockpt.tracing import Tracer
from tests.measuring.sharded_models import WIDTH, Layer
from tests.runtime.processes import needs_gloo, on_ranks

pytestmark = [pytest.mark.slow, needs_gloo, pytest.mark.usefixtures("full_caches")]
MICRO_BATCHES, ROWS, VOCABULARY = 6, 512, 256
SCHEDULES = {"gpipe": (ScheduleGPipe, (MICRO_BATCHES, MICRO_BATCHES)), "1f1b": (Schedule1F1B, (2, 1))}


class Part(nn.Module):
    """One of two halves of a model of four layers, with a head on the last."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if rank == 0 else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY) if rank == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.head(x)


def part(rank: int) -> Part:
    torch.manual_seed(rank)
    return Part(rank)


def tokens(micro_batches: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (micro_batches * ROWS,), generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step_of(rank: int, in_flight: int, **more: object) -> autockpt.Step:
    ids = tokens(1)
    if rank == 0:
        return autockpt.Step(part(rank), ids, in_flight=in_flight, accumulate=MICRO_BATCHES, **more)
    batch = torch.randn(ROWS, WIDTH, requires_grad=True), ids
    return autockpt.Step(part(rank), batch, loss=loss, in_flight=in_flight, accumulate=MICRO_BATCHES, **more)


def in_the_pipeline(rank: int, model: nn.Module, schedule: str, kept: bool) -> tuple[int, list[Tensor]]:
    """The stage's peak above its weights in a second step, and its gradients."""
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    run = SCHEDULES[schedule][0](stage, MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
    ids = tokens(MICRO_BATCHES)

    def step() -> None:
        torch.manual_seed(rank)
        run.step(**{"target": ids} if rank else {}, return_outputs=kept) if rank else run.step(ids)

    step()
    stage.clear_runtime_states()
    model.zero_grad(set_to_none=True)
    peak = allocator_peak(step) + MICRO_BATCHES * ROWS * WIDTH * 4  # and what it receives, in buffers that are kept
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return peak, gradients


def stages(rank: int) -> list[str]:
    wrong, names = [], ("layers.0", "layers.1")
    for schedule, kept in (("gpipe", True), ("1f1b", False)):
        model = part(rank)
        _, plain = in_the_pipeline(rank, model, schedule, kept)
        with Tracer.from_step(step_of(rank, SCHEDULES[schedule][1][rank], return_outputs=kept)) as tracer:
            for kind in ("save", "recompute", "offload"):
                choices = dict.fromkeys(names, parse_choice(kind))
                graph = tracer.trace(choices)
                foretold = graph.peak_bytes - graph.resident_bytes
                with autockpt.apply(model, choices):
                    peak, gradients = in_the_pipeline(rank, model, schedule, kept)
                if abs(foretold - peak) > max(0.02 * peak, 0.3 * 2**20):
                    wrong.append(f"{schedule}, {kind}: {foretold} bytes foretold, {peak} in the pipeline")
                if not all(map(torch.equal, plain, gradients)):
                    wrong.append(f"{schedule}, {kind}: gradients differ")
    return wrong


def test_a_stage_alone_is_the_stage_in_the_pipeline(tmp_path: Path) -> None:
    assert on_ranks(stages, tmp_path) == []
