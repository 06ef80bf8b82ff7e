"""Calls of `remake` that go by what earlier ones did: as long as they do the same, and no further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.errors import AutockptError
from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice
from tests.policies.zoo import bytes_alive_after

STEPS = 6


NOW = [0]


class Unit(nn.Module):
    """Layers around what a test wants, which is given the number of the step."""

    def __init__(self, then: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.then, self.last = nn.Linear(32, 32), then, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.then(F.silu(self.first(x)) * x, NOW[0])
        return self.last(F.gelu(hidden) * hidden)


def steps(
    then: Callable[[Tensor, int], Tensor], choice: Any, sizes: tuple[int, ...] = (64,), *, autocast: bool = False
) -> Iterator[list[Tensor]]:
    """Gradients of every step."""
    model = nn.Sequential(Unit(then))
    kind = {} if choice is None else {"0": parse_choice(choice)}
    with attach(model, kind):
        for step in range(STEPS):
            torch.manual_seed(step)
            NOW[0] = step
            model.zero_grad()
            size = sizes[step % len(sizes)]
            with torch.autocast("cpu", torch.bfloat16, autocast):
                out = model(torch.randn(size, 32, requires_grad=True))
            out.square().sum().backward()
            yield [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that are recorded."""
    ops: list[Any] = []
    run = OpRecorder.run
    monkeypatch.setattr(OpRecorder, "run", lambda recorder, *args: ops.append(args[0]) or run(recorder, *args))
    return ops


class _Projected(nn.Module):
    """``first`` is large next to what it is given, ``last`` so small that it is kept: backward reads casts of both."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 256, bias), nn.Linear(256, 8, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.last(F.silu(self.first(x)))).sin().repeat(1, 4)


_ROWS = 1024


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("choice", ["remake", {"kind": "remake", "keep": ["**"]}])
def test_calls_under_autocast_and_without_are_apart(choice: Any, remembers: bool, noted: list[Any]) -> None:
    model = nn.Sequential(_Projected(), nn.Linear(32, 32))
    x = torch.randn(_ROWS, 32, requires_grad=True)

    def forward(autocast: bool = True) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=remembers):
            return model(x)

    def gradients(autocast: bool) -> list[Tensor]:
        model.zero_grad()
        forward(autocast).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = {autocast: gradients(autocast) for autocast in (True, False)}
    with attach(model, {"0": parse_choice(choice)}):
        first = bytes_alive_after(forward)
        forward()
        forward(autocast=False)  # which one recording is enough of
        ops = len(noted)
        assert ops
        for autocast in (True, False, True):
            assert all(map(torch.equal, wanted[autocast], gradients(autocast)))
        assert len(noted) == ops
        assert bytes_alive_after(forward) <= first


def _write(h: Tensor, step: int) -> Tensor:
    h = torch.tanh(h)
    y = torch.exp(h * 0.1) * h
    if step == 3:
        h.data.mul_(0.5)
    return y * h


def _caught(h: Tensor, step: int) -> Tensor:
    h = torch.sigmoid(h)
    if step >= 3:
        try:
            torch.mm(h, torch.ones(7, 7))
        except RuntimeError:
            h = h * 2
    return h.exp()


def _without_gradient(h: Tensor, step: int) -> Tensor:
    with torch.set_grad_enabled(step < 3):
        y = torch.exp(h * 0.1) * torch.tanh(h)
    return h.sigmoid() * (1 + y)


def _inner_gradient(h: Tensor, step: int) -> Tensor:
    y = h.tanh().exp()
    (g,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    return y.sin().exp() * (1 + g)


class _Rows(nn.Module):
    """Uses those weights that a tensor without a size says."""

    def __init__(self, take: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.bank, self.take = nn.Parameter(torch.linspace(0, 1, 8 * 96 * 32).reshape(8, 96, 32)), take

    def forward(self, h: Tensor, step: int) -> Tensor:
        return (h * torch.sin(self.take(self.bank, (h.detach().sum() * 1e3).long() % 8)[: len(h)])).exp()


class _Attends(nn.Module):
    """Saves its queries' multiples, not its queries, which no function returns."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)

    def forward(self, h: Tensor, step: int) -> Tensor:
        return self.attention(h, h, h, need_weights=True)[0]


SAME = ("the same each time", "attention in one function", "dropout in attention", "dropout", "a gradient taken inside")
ODD: dict[str, Callable[[Tensor, int], Tensor]] = {
    "the same each time": lambda h, step: torch.tanh(h * 1.5 + 1.0).exp(),
    "attention in one function": _Attends(),
    "dropout in attention": lambda h, step: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.2)[0],
    "a number that changes": lambda h, step: torch.tanh(h * (1 + 0.1 * step) + 1.0).exp(),
    "a number that changes late": lambda h, step: torch.tanh(h + (1.0 if step < 3 else -1.0)).exp() * h,
    "another branch": lambda h, step: torch.sigmoid(h).exp() if step < 3 else torch.tanh(h).exp(),
    "another order": lambda h, step: (h.sin() if step < 3 else h.cos()) * (h.cos() if step < 3 else h.sin()),
    "another tensor": lambda h, step: (a := h.sin(), b := h.cos(), (a if step < 3 else b).exp() * a)[-1],
    "one more at the end": lambda h, step: h.exp() if step < 3 else h.exp().exp(),
    "what a value decides": lambda h, step: h.exp() if h.detach().sum().item() > step - 3 else h.sin().exp(),
    "as many rows as a value says": lambda h, step: torch.cat([h.exp() * h, h[h[:, 0] > 0].sin().exp()])[:64],
    "the weights that a tensor says": _Rows(lambda bank, at: bank[at]),
    "a constant from outside": lambda h, step: h * torch.full((32,), 1.0 + step).exp(),
    "dropout": lambda h, step: F.dropout(h, 0.3).exp() * F.dropout(h, 0.1 * step),
    "a write to a tensor of its own": lambda h, step: (h * 2.0).mul_(1.5).exp(),
    "a write that begins late": _write,
    "an error that is caught": _caught,
    "gradients switched off late": _without_gradient,
    "a gradient taken inside": _inner_gradient,
    "autocast that begins late": lambda h, step: (
        torch.autocast("cpu", torch.bfloat16, step >= 3).__call__(lambda t: (t @ t.T).sigmoid() @ t)(h * 0.1).float()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("choice", ["remake", {"kind": "remake", "keep": ["**"]}])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_whatever_changes_between_calls_is_right_or_refused(odd: str, choice: Any, autocast: bool) -> None:
    sizes = (96, 64)
    expected, found = (
        [*steps(ODD[odd], None, sizes, autocast=autocast)],
        steps(ODD[odd], choice, sizes, autocast=autocast),
    )
    for step, wanted in enumerate(expected):
        try:
            assert all(map(torch.equal, next(found), wanted)), step
        except AutockptError as error:
            assert step and "0" in error.message and odd not in SAME
            break
