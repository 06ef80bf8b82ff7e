"""Ops that a dispatch mode changes are refused where one would look on, and work everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, parse_choice
from tests.errors import raises
from tests.policies.zoo import assert_equal

WATCHING = [parse_choice(c) for c in ("remake", {"kind": "remake", "keep": ["**"]})]
OTHERS = [parse_choice(c) for c in ("recompute", "selective", "offload", {"kind": "remake", "within": ["first"]})]


class Unit(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.then = nn.Linear(16, 16), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x)).sin()


def pinv(x: Tensor) -> Tensor:
    return torch.linalg.pinv(torch.complex(x, x.sin())).real


def bilinear(x: Tensor) -> Tensor:
    return nn.functional.bilinear(x.float(), x.float(), torch.ones(16, 16, 16))


def sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(8).to_sparse(), x.float())


def gradients(then: Callable[[Tensor], Tensor], choice: Choice, autocast: bool) -> dict[str, Tensor]:
    model = nn.Sequential(Unit(then))
    with attach(model, {"0": choice}):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(torch.randn(8, 16)).float().square().sum()
        loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("choice", [*WATCHING, *OTHERS], ids=str)
@pytest.mark.parametrize(
    ("then", "autocast"), [(pinv, False), (bilinear, True), (sparse, True), (bilinear, False), (sparse, False)]
)
def test_refused_where_a_mode_would_look_on_and_exact_elsewhere(then, autocast, choice):
    if choice in WATCHING and (autocast or then is pinv):
        with raises(ConflictError, "aten."):
            gradients(then, choice, autocast)
    elif (then, autocast) != (sparse, True):  # which plain training cannot, either
        assert_equal(gradients(then, choice, autocast), gradients(then, parse_choice("save"), autocast))


@pytest.mark.slow
@pytest.mark.parametrize("choice", [*WATCHING, *OTHERS], ids=str)
@pytest.mark.parametrize("returned", ["tensor", "tuple"])
def test_torch_cond(returned: str, choice: Choice) -> None:
    def conditional(x: Tensor) -> Tensor:
        if returned == "tuple":
            return torch.cond(x.sum() > 0, lambda t: (t.sin(),), lambda t: (t.cos(),), (x,))[0]
        return x * torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    if choice.kind == "remake" and not choice.within:
        with pytest.raises(ConflictError):
            gradients(conditional, choice, False)
    else:
        found = gradients(conditional, choice, False)
        assert_equal(found, gradients(conditional, parse_choice("save"), False))
