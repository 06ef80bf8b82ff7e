"""The loss is found in whatever a model returns, and use_cache goes only where it is understood."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.workload.losses import default_loss, find_loss, takes_use_cache

LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    "output", [LOSS, {"loss": LOSS}, SimpleNamespace(loss=LOSS), (LOSS, torch.ones(2)), [LOSS, torch.ones(2)]]
)
def test_found(output: Any) -> None:
    assert find_loss(output) is LOSS


class Caching(nn.Module):
    def forward(self, x: int, use_cache: bool = True) -> Any:
        return {"loss": (x, use_cache)}


class Plain(nn.Module):
    def forward(self, x: int) -> Any:
        return {"loss": (x, None)}


class PassingOn(nn.Module):
    def __init__(self, generates: bool, caches: bool = True) -> None:
        super().__init__()
        self.generates, self.config = generates, SimpleNamespace(use_cache=caches)

    def can_generate(self) -> bool:
        return self.generates

    def forward(self, x: int, **kwargs: Any) -> Any:
        return {"loss": (x, kwargs.get("use_cache"))}


@pytest.mark.parametrize(
    ("model", "takes"),
    [
        (Caching(), True),
        (Plain(), False),
        (PassingOn(True), True),
        (PassingOn(False), False),
        (PassingOn(True, caches=False), False),
        (torch.compile(Caching()), True),
        (nn.DataParallel(Caching()), True),
    ],
)
def test_use_cache_is_only_passed_where_it_is_understood(model: Any, takes: bool) -> None:
    assert takes_use_cache(model) is takes
    step = default_loss(model, {"x": 1})
    assert isinstance(step, partial) is takes
