"""Bytes that each stage of a pipeline needs: predicted from the stage alone, measured in the pipeline (gloo, CPU).

    OMP_NUM_THREADS=1 python -m tests.evidence.pipelines

llama-tiny in stages as the job file's ``stage`` cuts it, 6 micro-batches of 2 × 128 tokens, fp32. Bytes are above those
of the weights, with the buffers for what a stage receives. Gradients under plans are compared with plain training's.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import autockpt
from autockpt.devices.cpu import allocator_peak
from autockpt.schema import WorkloadSpec
from autockpt.schema.choices import parse_choice
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.evidence.tables import head, row
from tests.runtime.processes import in_processes

MICRO_BATCHES, ROWS, LENGTH = 6, 2, 128
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Stage(nn.Module):
    """The parts of a model that a stage has, as a module that takes and returns one tensor."""

    def __init__(self, whole: Any, last: bool) -> None:
        super().__init__()
        self.model, self.lm_head, self.last = whole.model, whole.lm_head, last

    def forward(self, x: Tensor) -> Tensor:
        given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        hidden = self.model(**given, use_cache=False)[0]
        return self.lm_head(hidden) if self.last else hidden


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def in_the_pipeline(rank: int, stages: int, schedule: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=stages)
    spec = WorkloadSpec(
        model="llama-tiny", batch_size=ROWS, seq_len=LENGTH, packed=True, accumulate=MICRO_BATCHES, optimizer="none",
        stage=f"{rank}/{stages} {schedule}",
    )  # fmt: skip
    whole: Any = build(spec).model
    last, model = rank == stages - 1, Stage(whole, rank == stages - 1)
    ids = torch.randint(0, 256, (ROWS * MICRO_BATCHES, LENGTH), generator=torch.Generator().manual_seed(1))
    sent = ROWS * LENGTH * whole.config.hidden_size * 4
    buffers = MICRO_BATCHES * sent * ((rank > 0) + (not last))
    plain: list[Tensor] = []
    with Tracer.from_spec(spec, fallback=False) as tracer:
        for kind in ("save", "recompute", "offload"):
            plan = dict.fromkeys((u.name for u in tracer.units if u.role == "block"), parse_choice(kind))
            graph = tracer.trace(plan)
            stage = PipelineStage(model, rank, stages, torch.device("cpu"))
            steps = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=loss)

            def step(steps: Any = steps) -> None:
                steps.step(*(() if rank else (ids,)), **({"target": ids} if last else {}))

            with autockpt.apply(model, plan):
                step()
                stage.clear_runtime_states()
                model.zero_grad(set_to_none=True)
                peak = allocator_peak(step) + buffers
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad(set_to_none=True)
            plain = plain or gradients
            row = kind, peak, graph.peak_bytes - graph.resident_bytes, all(map(torch.equal, plain, gradients))
            rows: list[Any] = [None] * stages
            dist.all_gather_object(rows, row)
            Path(folder, f"{kind}.json").write_text(json.dumps(rows)) if rank == 0 else None
    dist.barrier()
    os._exit(0)


def main() -> None:
    names = ("schedule", "stage", "plan", "in the pipeline, bytes", "predicted", "difference", "gradients")
    print(head(names), flush=True)
    for schedule in SCHEDULES:
        for stages in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                in_processes(in_the_pipeline, (stages, schedule, folder), stages)
                found = [json.loads(Path(folder, f"{k}.json").read_text()) for k in ("save", "recompute", "offload")]
            for stage in range(stages):
                for kind, peak, said, equal in (rows[stage] for rows in found):
                    same = "bit-equal" if equal else "DIFFERENT"
                    bytes_ = f"{peak:,}", f"{said:,}", f"{said - peak:+,}"
                    print(row((schedule, f"{stage}/{stages}", kind, *bytes_, same)))


if __name__ == "__main__":
    main()
