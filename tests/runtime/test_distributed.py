"""Two processes that train together (gloo): a plan on every rank, gradients bit-equal with plain training."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Segment
from tests.policies.zoo import CASES

LLAMA = CASES["llama"]
LAYERS = tuple(f"model.layers.{i}" for i in range(3))
PLANS: tuple[dict[str, Choice], ...] = (
    dict(zip(LAYERS, (RECOMPUTE, OFFLOAD, SAVE), strict=True)),
    dict.fromkeys(LAYERS, Segment(size=3)),
    dict.fromkeys(LAYERS, Segment(size=3, levels=2)),
)
WAYS = ("ddp", "fsdp2", "fsdp2 in 16 bits")


def shard(model: Any, way: str) -> Any:
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "16" in way else None)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(rank: int, way: str, order: str, plan: dict[str, Choice]) -> list[Tensor]:
    model = LLAMA.make()
    if order == "before":
        attach(model, plan)
    wrapped = shard(model, way)
    if order == "after":
        attach(wrapped, plan)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for _ in range(2):
        batch = {k: v.roll(rank, 1) for k, v in LLAMA.batch().items()}
        wrapped(**batch, use_cache=False).loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            seen.append((gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def one_process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    wrong = []
    for way in WAYS:
        wanted = train(rank, way, "never", {})
        for order, (number, plan) in itertools.product(("before", "after"), enumerate(PLANS)):
            got = train(rank, way, order, plan)
            if len(got) != len(wanted) or not all(map(torch.equal, got, wanted)):
                wrong.append(f"{way}, plan {number} attached {order}")
    Path(folder, f"{rank}.txt").write_text("\n".join(wrong))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_ddp_and_fsdp2(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(one_process, (port, str(tmp_path)), nprocs=2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["", ""]
