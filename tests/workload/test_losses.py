"""The loss is found in whatever a model returns, and use_cache goes only where it is understood."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.errors import WorkloadError
from autockpt.workload.losses import default_loss, find_loss, inner_model, loss_of, takes_use_cache

LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    "output", [LOSS, {"loss": LOSS}, SimpleNamespace(loss=LOSS), (LOSS, torch.ones(2)), [LOSS, torch.ones(2)]]
)
def test_found(output: Any) -> None:
    assert find_loss(output) is LOSS


@pytest.mark.parametrize("output", [None, torch.ones(2), {"logits": LOSS}, {}, (), SimpleNamespace(loss=None), "text"])
def test_not_found(output: Any) -> None:
    with pytest.raises(WorkloadError, match="no loss"):
        find_loss(output)


@pytest.mark.parametrize("output", [(LOSS, LOSS * 2), [LOSS] * 3])
def test_several_losses_are_not_guessed_together(output: Any) -> None:
    with pytest.raises(WorkloadError, match=r"returned [23] losses"):
        find_loss(output)
    assert find_loss((LOSS, LOSS * 2, torch.ones(2))) is LOSS, "as transformers' experts return it"


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


def test_a_batch_that_says_use_cache_itself_is_left_alone() -> None:
    assert default_loss(Caching(), {"x": 1, "use_cache": True}) is loss_of
    assert loss_of(Caching(), {"x": 1, "use_cache": True}) == (1, True)
    assert default_loss(Caching(), {"x": 1})(Caching(), {"x": 1}) == (1, False)


def test_inner_model_looks_through_wrappers() -> None:
    plain: Any = Caching()
    assert inner_model(plain) is plain
    assert inner_model(torch.compile(nn.DataParallel(plain))) is plain  # type: ignore[arg-type]
