"""Ops that a dispatch mode changes are refused where one would look on, and work everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.schema.choices import Choice, parse_choice
from tests.errors import raises
from tests.policies.zoo import assert_as_plain, trained

WATCHING = [parse_choice(c) for c in ("remake", {"kind": "remake", "keep": ["**"]})]
OTHERS = [parse_choice(c) for c in ("recompute", "selective", "offload", {"kind": "remake", "within": ["first"]})]


class Unit(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(16, 16), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x)).sin()


def pinv(x: Tensor) -> Tensor:
    return torch.linalg.pinv(torch.complex(x, x.sin())).real


def bilinear(x: Tensor) -> Tensor:
    return nn.functional.bilinear(x.float(), x.float(), torch.ones(16, 16, 16))


def sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(8).to_sparse(), x.float())


def rows() -> Tensor:
    return torch.randn(8, 16)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("choice", [*WATCHING, *OTHERS], ids=str)
@pytest.mark.parametrize(
    ("then", "around"),
    [(pinv, nullcontext), (bilinear, autocast), (sparse, autocast), (bilinear, nullcontext), (sparse, nullcontext)],
)
def test_refused_where_a_mode_would_look_on_and_exact_elsewhere(then, around, choice):
    make, plan = lambda: nn.Sequential(Unit(then)), {"0": choice}
    if choice in WATCHING and (around is autocast or then is pinv):
        with raises(ConflictError, "aten."):
            trained(make, plan, rows, around=around)
    elif (then, around) != (sparse, autocast):  # which plain training cannot, either
        assert_as_plain(make, plan, rows, 1, around=around)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [*WATCHING, *OTHERS], ids=str)
@pytest.mark.parametrize("returned", ["tensor", "tuple"])
def test_torch_cond(returned: str, choice: Choice) -> None:
    def conditional(x: Tensor) -> Tensor:
        if returned == "tuple":
            return torch.cond(x.sum() > 0, lambda t: (t.sin(),), lambda t: (t.cos(),), (x,))[0]
        return x * torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    refused = choice.kind == "remake" and not choice.within
    with pytest.raises(ConflictError) if refused else nullcontext():
        assert_as_plain(lambda: nn.Sequential(Unit(conditional)), {"0": choice}, rows, 1)
