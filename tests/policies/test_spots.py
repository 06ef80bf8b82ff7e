"""What begins between forward and backward late in training is found by a few elements of each call, in whatever order
a tensor lies and whether or not it has a gradient of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.policies.spots import IN_TURN, Places, can_be_spotted
from autockpt.runtime import attach
from autockpt.schema.choices import from_label


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.silu(self.first(x)))

    def change(self) -> None:
        self.first.weight.data.mul_(0.9)


class Gate(nn.Module):
    """Of what its buffer leads to only a tensor is saved that has no gradient."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            gate = torch.sigmoid(h * self.scale)
        return x + self.down(torch.nn.functional.gelu(h)) * gate

    def change(self) -> None:
        self.scale.data.mul_(0.9)


@pytest.mark.parametrize(
    ("unit", "kind"),
    # `selective` keeps what a convolution returns: backward alone reads its weight, as in plain training
    [(unit, kind) for unit in (Convolution, Gate) for kind in ("recompute", "remake")] + [(Gate, "selective")],
)
def test_a_change_by_data_before_backward_is_found_soon(unit, kind) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(unit() for _ in range(2)))
    shape = (2, 16) if unit is Gate else (2, 8, 6, 6)
    x = torch.randn(shape)
    if unit is Convolution:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with attach(model, dict.fromkeys(("0", "1"), from_label(kind)), sentinels="sample") as session:
        for _ in range(4):
            model(x).square().mean().backward()
        assert session.proof().spots > 0
        with pytest.raises(RerunMismatch, match="was not given what its forward had computed"):
            for _ in range(12):  # all that is looked at has had its turn
                loss = model(x).square().mean()
                for each in model:
                    each.change()
                loss.backward()


def test_which_tensors_can_be_looked_at() -> None:
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    since = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]
    made = x * 2
    assert can_be_spotted(made, since) and can_be_spotted(made.detach(), since)
    assert can_be_spotted(made.contiguous(memory_format=torch.channels_last), since)
    assert not can_be_spotted(made.transpose(1, 3)[:, ::2], since)  # in pieces
    assert not can_be_spotted(x, since)  # no more than a leaf, and nothing that was computed
    assert not can_be_spotted(made, torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def test_the_last_with_a_gradient_is_looked_at_in_every_call_and_the_others_in_turn() -> None:
    places = Places(9, [0, 2, 4, 6, 8], last=6)
    turns = [places.in_turn(call) for call in range(3)]
    assert all(6 in turn and len(turn) <= 1 + IN_TURN for turn in turns)
    assert frozenset().union(*turns) == {0, 2, 4, 6, 8}
