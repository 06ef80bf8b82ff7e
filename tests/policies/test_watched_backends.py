"""Watching on a backend that nobody has looked at: the CPU counts as one here."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.policies import remake, watched_backends
from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice
from tests.policies.zoo import Tally

CALLS = Tally()


class Unit(nn.Module):
    """Draws random numbers and changes a buffer; notes its calls, those of copies too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = inner, nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.calls += 1
        return self.drop(self.norm(self.inner(x)))


class Trilinear(nn.Module):
    """Under autocast its kernel's products are cast only where no mode looks on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bilinear(x, x, self.weight)


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.unit = Unit(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(x)


@pytest.fixture(autouse=True)
def unknown_cpu(monkeypatch):
    monkeypatch.setattr(watched_backends, "KNOWN", ())


def trained(choice: str) -> tuple[list[torch.Tensor], list[int]]:
    """What two steps under autocast leave behind, and how often the unit's forward ran in each."""
    torch.manual_seed(3)
    model, found, ran = Model(nn.Linear(8, 8)), [], []
    with attach(model, {"unit": parse_choice(choice)}):
        for _ in range(2):
            CALLS.calls = 0
            x = torch.randn(4, 8, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                model(x * 1).float().pow(2).sum().backward()
            found += [x.grad, *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
            ran.append(CALLS.calls)
    return [*found, torch.rand(3)], ran


@pytest.mark.parametrize(
    ("choice", "ran"), [("recompute", [2, 2]), ("selective", [2, 2]), ("keep_attention", [2, 2]), ("remake", [3, 1])]
)
def test_a_unit_that_watching_does_not_change_is_compared_once_and_trains_as_ever(choice, ran):
    wanted, once = trained("save")
    assert once == [1, 1]
    found, times = trained(choice)
    assert times == ran
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_each_type_that_autocast_computes_in_is_compared_once():
    model, ran = Model(nn.Linear(8, 8)), []
    with attach(model, {"unit": parse_choice("remake")}):
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            CALLS.calls = 0
            with torch.autocast("cpu", dtype):
                model(torch.randn(4, 8))
            ran.append(CALLS.calls)
    assert ran == [3, 3, 1]


def test_one_that_it_changes_is_refused_by_name(monkeypatch):
    # what is known of the CPU
    monkeypatch.setattr(remake, "refuse_watching", lambda func, args, unit: None)
    model = Model(Trilinear())
    x = torch.randn(4, 8)
    with attach(model, {"unit": parse_choice("remake")}):
        model(x)  # without autocast nothing changes
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConflictError, match="unit gives other bits on this"):
            model(x)


@pytest.mark.parametrize("choice", ["selective", "remake"])
def test_a_forward_that_fails_has_drawn_what_it_draws(choice):
    def fails(chosen: str) -> torch.Tensor:
        torch.manual_seed(3)
        model = Model(nn.Dropout(0.5))
        model.unit.drop = nn.Linear(3, 3)  # does not fit
        with attach(model, {"unit": parse_choice(chosen)}), pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 8))
        return torch.rand(3)

    assert torch.equal(fails(choice), fails("save"))


def test_one_that_cannot_be_copied_is_refused():
    model = Model(nn.Linear(8, 8))
    model.unit.lock = threading.Lock()
    with attach(model, {"unit": parse_choice("remake")}), pytest.raises(ConflictError, match="cannot be copied"):
        model(torch.randn(4, 8))


class Backward(nn.Module):
    """Runs backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.square().sum().backward(retain_graph=True)
        return y


def test_one_that_runs_backward_itself_is_refused():
    model = Model(Backward())
    with attach(model, {"unit": parse_choice("remake")}), pytest.raises(ConflictError, match="unit runs backward in"):
        model(torch.randn(4, 8))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_known_backends_are_not_asked(monkeypatch):
    monkeypatch.undo()
    assert trained("remake")[1] == [1, 1]
