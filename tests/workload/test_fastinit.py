"""Cheap random numbers have the asked-for spread, and small tensors are drawn as ever."""

import torch
from torch import nn

from autockpt.workload.fastinit import FastInit


def test_mean_and_spread_are_kept() -> None:
    parameter = nn.Parameter(torch.empty(1500, 1400, dtype=torch.bfloat16))
    weight = parameter.detach()
    with FastInit():
        nn.init.normal_(parameter, mean=0.5, std=0.02)
    assert abs(float(weight.float().mean()) - 0.5) < 1e-3 and abs(float(weight.float().std()) - 0.02) < 1e-3
    assert parameter.requires_grad and torch.isfinite(weight).all()
    assert torch.unique(weight.float(), dim=0).shape[0] == 1500  # no two rows are equal
    with FastInit():
        nn.init.uniform_(parameter, -0.1, 0.1)
    assert -0.101 < float(weight.min()) < -0.09 and 0.09 < float(weight.max()) < 0.101
