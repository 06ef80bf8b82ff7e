"""Casts of weights that autocast remembers, in forwards that run again."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds, parse_choice

AGAIN = ["recompute", "recompute_offload", "selective", "keep_attention", "segment"]
Update = Callable[[nn.Module], None]


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def trained(kind: str, second: Update, *, inside: bool, sentinels: str = "off") -> list[Tensor]:
    """Gradients of two steps that have two updates in a block of autocast each. ``inside``: the second backward runs
    in the block, too."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
    model, x = nn.Sequential(nn.Linear(16, 16), block, nn.Linear(16, 16)), torch.randn(64, 16)
    found = []

    def backward(loss: Tensor) -> None:
        loss.backward()
        found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        model.zero_grad()

    with attach(model, {"1": parse_choice(kind)}, sentinels=sentinels):  # type: ignore[arg-type]
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                backward(model(x).square().mean())
                second(model)
                loss = model(x).square().mean()
                if inside:
                    backward(loss)
            if not inside:
                backward(loss)
            update(model)
    return found


@pytest.mark.parametrize("kind", AGAIN)
@pytest.mark.parametrize("inside", [False, True])
def test_of_weights_that_have_changed_since_they_are_refused(inside: bool, kind: str) -> None:
    with pytest.raises(RerunMismatch):  # what is computed from the new casts is compared
        trained(kind, update, inside=inside, sentinels="sample")


def cleared(model: nn.Module) -> None:
    update(model)
    torch.clear_autocast_cache()


@pytest.mark.parametrize("second", [lambda model: None, cleared], ids=["no update", "cleared"])
@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_casts_of_weights_as_they_are_can_be_made_again(kind: str, second: Update) -> None:
    assert all(map(torch.equal, trained("save", second, inside=False), trained(kind, second, inside=False)))


def adversarial(kind: str, unit: nn.Module, sentinels: Any = "off") -> list[Tensor]:
    """Gradients of steps on an input that each changes, in one block."""
    model, found = nn.ModuleList([deepcopy(unit)]), []
    x = torch.ones(4, 8, requires_grad=True)
    with attach(model, {"0": parse_choice(kind)}, sentinels=sentinels), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model[0](x).float().square().sum().backward()
            assert x.grad is not None
            found += [t.clone() for t in (x.grad, *[p.grad for p in model.parameters() if p.grad is not None])]
            with torch.no_grad():
                x.add_(x.grad.sign(), alpha=0.1)
    return found


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
@pytest.mark.parametrize("normed", [False, True])
def test_changed_inputs_are_refused_where_they_are_cast_again(normed: bool, kind: str) -> None:
    """Most layers begin with a norm, of whose input no cast is made."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    unit = nn.Sequential(nn.LayerNorm(8), mlp) if normed else mlp
    if kind in AGAIN and not normed:
        with pytest.raises(RerunMismatch):
            adversarial(kind, unit, sentinels="sample")
    else:
        assert all(map(torch.equal, adversarial(kind, unit), adversarial("save", unit)))
