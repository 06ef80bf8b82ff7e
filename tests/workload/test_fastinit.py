"""Cheap random numbers have the asked-for spread, and small tensors are drawn as ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autockpt.workload.fastinit import FastInit, fast_init


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_and_spread_are_kept(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.empty(1500, 1400, dtype=dtype))
    weight = parameter.detach()
    with FastInit():
        nn.init.normal_(parameter, mean=0.5, std=0.02)
    assert abs(float(weight.float().mean()) - 0.5) < 1e-3 and abs(float(weight.float().std()) - 0.02) < 1e-3
    assert parameter.requires_grad and torch.isfinite(weight).all()
    assert torch.unique(weight.float(), dim=0).shape[0] == 1500  # no two rows are equal
    with FastInit():
        nn.init.uniform_(parameter, -0.1, 0.1)
    assert -0.101 < float(weight.min()) < -0.09 and 0.09 < float(weight.max()) < 0.101


def test_small_tensors_are_untouched_by_it() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(0)
        return nn.Linear(100, 100).weight

    with FastInit():
        cheap = draw()
    assert torch.equal(cheap, draw())


@pytest.mark.slow
def test_large_tensors_are_not_drawn_whole() -> None:
    with FastInit():
        weight = nn.Linear(2_000, 2_000).weight  # by its own initialisation
    assert weight.detach().unique().numel() <= 1_000_003


def test_it_stays_out_of_the_way_of_tensors_that_are_not_real() -> None:
    assert isinstance(fast_init(), FastInit)
    with FakeTensorMode():
        assert not isinstance(fast_init(), FastInit)


def test_the_seed_decides() -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with FastInit():
            return torch.empty(2_000_000).normal_()

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
