from __future__ import annotations

import torch
from torch import Tensor, nn

from autockpt.schema.graph import Unit
from autockpt.tracing.recorder import RealRecorder
from autockpt.tracing.run import refine


class Net(nn.Module):
    """Blocks called in another order than they stand in, one with another input, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[2](self.blocks[0](x))
        return self.blocks[1](torch.cat([x, x]))


def test_order_of_first_call_and_kinds_by_behaviour() -> None:
    model = Net()
    found = [Unit(name=f"blocks.{i}", cls="Sequential", kind=0) for i in range(4)]
    found += [Unit(name=f"blocks.{i}.0", cls="Linear", kind=1, role="mlp", parent=f"blocks.{i}") for i in range(4)]
    recorder = RealRecorder(torch.device("cpu"))
    recorder.location.bind(model)
    with recorder.recording():
        model(torch.ones(2, 4, requires_grad=True) * 1.0).sum().backward()
    units = refine(found, recorder)
    assert [u.name for u in units] == [*(f"blocks.{i}" for i in (0, 2, 1)), *(f"blocks.{i}.0" for i in (0, 2, 1))]
    assert [u.kind for u in units] == [0, 0, 1, 2, 2, 3]
    assert units[3].parent == "blocks.0"
