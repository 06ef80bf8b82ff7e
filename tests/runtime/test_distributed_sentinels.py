"""Sentinels of several processes (gloo): where one raises the other does not wait for ever; and of sharded layers."""

import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autockpt.errors import RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE
from tests.policies.zoo import Row
from tests.runtime.processes import in_processes, meet, needs_gloo

pytestmark = pytest.mark.slow


class Layer(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.a, self.b, self.wrong = nn.Linear(8, 8), nn.Linear(8, 8), wrong

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x * (1 + random.SystemRandom().random() * self.wrong))))


def model_of(*, wrong: bool) -> Any:
    return Row(lambda: Layer(wrong))


def two_steps(rank: int, folder: str) -> None:
    meet(rank, folder, timeout=timedelta(seconds=120))
    model = nn.parallel.DistributedDataParallel(model_of(wrong=rank == 1))
    attach(model, {"units.0": RECOMPUTE, "units.1": RECOMPUTE})
    seen = []
    try:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            seen.append("backward")
    except RerunMismatch as error:
        seen.append(error.message[:26])
    except RuntimeError:  # gloo: the connection was closed by the peer
        seen.append("the other is gone")
    Path(folder, f"{rank}.txt").write_text(", ".join(seen))
    os._exit(0)


@needs_gloo
def test_the_other_rank_sees_this_one_gone_instead_of_waiting(tmp_path: Path) -> None:
    in_processes(two_steps, (str(tmp_path),), 2)
    assert (tmp_path / "1.txt").read_text() == "backward of units.1 was no"
    assert (tmp_path / "0.txt").read_text().endswith("the other is gone")


def sharded(rank: int, folder: str) -> None:
    """By FSDP2, and by DTensor within a layer: how many tensors were compared, and whether a mismatch is seen."""
    meet(rank, folder, 1)
    mesh, seen = init_device_mesh("cpu", (1,)), []
    for wrong in (False, True):
        for split in (_by_fsdp, _by_dtensor):
            model = model_of(wrong=wrong)
            split(model, mesh)
            with attach(model, {"units.0": RECOMPUTE, "units.1": RECOMPUTE}) as session:
                try:
                    model(torch.randn(4, 8)).sum().backward()
                    check = session.sentinels
                    seen.append(f"{check.checks} {[*check.units['units.0'].unchecked]}")
                except RerunMismatch as error:
                    seen.append(error.message[:26])
    Path(folder, "seen.txt").write_text("\n".join(seen))
    os._exit(0)


def _by_fsdp(model: Any, mesh: DeviceMesh) -> None:
    for part in (*model.units, model):
        fully_shard(part, mesh=mesh)


def _by_dtensor(model: Any, mesh: DeviceMesh) -> None:
    a, b = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    for layer in model.units:
        parallelize_module(layer, mesh, {"a": a, "b": b})


@needs_gloo
def test_what_fsdp_and_dtensor_shard_is_checked(tmp_path: Path) -> None:
    in_processes(sharded, (str(tmp_path),), 1)
    mismatch = "backward of units.1 was no"
    assert (tmp_path / "seen.txt").read_text().splitlines() == ["2 []", "2 []", mismatch, mismatch]
