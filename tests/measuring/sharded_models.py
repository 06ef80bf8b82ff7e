"""A small model that torch's own engines shard, for tests of several ranks."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autockpt

LAYERS, WIDTH = 4, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def model_of_layers() -> Any:
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*(Layer() for _ in range(LAYERS)))))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sharded(kind: str, ranks: int) -> nn.Module:
    """``kind``: fsdp2, no-resharding, tensor-parallel, ddp or none."""
    torch.manual_seed(0)
    model = model_of_layers()
    if kind in ("fsdp2", "no-resharding"):
        reshard = kind == "fsdp2"
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=None if reshard else False)
    elif kind == "tensor-parallel":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model


def whole() -> tuple[nn.Module, Tensor, Any]:
    """A factory whose model the job shards."""
    return sharded("none", 1), torch.ones(256, WIDTH), squares


def by_itself() -> tuple[nn.Module, Tensor, Any]:
    """A factory that shards its own model, over two ranks."""
    return sharded("tensor-parallel", 2), torch.ones(256, WIDTH), squares


def with_optimizer() -> autockpt.Step:
    """A factory that makes an optimizer for whole weights."""
    model, batch, loss = whole()
    return autockpt.Step(model, batch, loss=loss, optimizer=torch.optim.SGD(model.parameters()))


def step_of(kind: str, ranks: int, rows: int = 256) -> autockpt.Step:
    model = sharded(kind, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return autockpt.Step(model, torch.ones(rows, WIDTH), loss=squares, optimizer=optimizer)
