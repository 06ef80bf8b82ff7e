"""Calls of `remake` that go by what earlier ones did: as long as they do the same, and no further."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.recipes import Step
from autockpt.errors import AutockptError, RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import from_label
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
    then: Callable[[Tensor, int], Tensor], choice: str | None, sizes: tuple[int, ...] = (64,), *, autocast: bool = False
) -> Iterator[list[Tensor]]:
    """Gradients of every step."""
    model = nn.Sequential(Unit(then))
    kind = {} if choice is None else {"0": from_label(choice)}
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


@pytest.mark.parametrize("then", ["the same each time", "attention in one function", "dropout in attention"])
def test_two_calls_are_recorded_and_later_ones_seldom(then: str, noted: list[Any]) -> None:
    model = nn.Sequential(Unit(ODD[then]))
    x, counts = torch.randn(64, 32), []
    with attach(model, {"0": from_label("remake")}):
        for _ in range(9):
            noted.clear()
            model(x).sum().backward()
            counts.append(len(noted))
    assert [bool(count) for count in counts] == [True, True, *[False] * 4, True, False, False]


def test_ops_that_several_tensors_are_made_by_run_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = Step.run
    monkeypatch.setattr(Step, "run", lambda step, values: ran.append(id(step)) or run(step, values))
    model = nn.Sequential(Unit(ODD["the same each time"]))
    with attach(model, {"0": from_label("remake")}, sentinels="off"):
        for _ in range(3):
            ran.clear()
            model(torch.randn(64, 32)).sum().backward()
            assert len(ran) == len(set(ran)) > 2


def test_a_padding_mask_is_not_kept_by_every_layer(noted: list[Any]) -> None:
    rows, length = 4, 128
    padding = torch.ones(rows, 1, length, length, dtype=torch.bool).tril()

    def attends(h: Tensor, _: int) -> Tensor:
        heads = h.view(rows, length, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=padding).transpose(1, 2).reshape(h.shape)

    model = nn.Sequential(Unit(attends))
    model[0].register_buffer("padding", padding)
    x = torch.randn(rows * length, 32, requires_grad=True)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    free = bytes_alive_after(lambda: model(x))
    with attach(model, {"0": from_label("remake")}):
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            assert all(map(torch.equal, wanted, (p.grad for p in model.parameters())))
        kept, first = bytes_alive_after(lambda: model(x)), len(noted)
        assert kept < 4 * padding.numel() < free  # as numbers of four bytes
        model(x).sum().backward()
        assert len(noted) == first


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
@pytest.mark.parametrize("choice", ["remake", '{"kind": "remake", "keep": ["**"]}'])
def test_calls_under_autocast_and_without_are_apart(choice: str, remembers: bool, noted: list[Any]) -> None:
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
    with attach(model, {"0": from_label(choice)}):
        first = bytes_alive_after(forward)
        forward()
        forward(autocast=False)  # which one recording is enough of
        ops = len(noted)
        assert ops
        for autocast in (True, False, True):
            assert all(map(torch.equal, wanted[autocast], gradients(autocast)))
        assert len(noted) == ops
        assert bytes_alive_after(forward) <= first


@pytest.mark.parametrize("choice", ["remake", '{"kind": "remake", "keep": ["**"]}'])
def test_a_cast_that_another_thread_made_is_right_or_refused(choice: str) -> None:
    def trained(choices: dict[str, Any]) -> list[Tensor]:
        unit, found, cast, over = _Projected(), [], threading.Event(), threading.Event()
        model, x = nn.Sequential(unit), torch.linspace(-1, 1, _ROWS * 32).view(-1, 32).requires_grad_()

        def elsewhere() -> None:
            for _ in range(5_000):
                _ = x * 1  # autograd numbers the nodes of each thread by themselves
            with torch.autocast("cpu", torch.bfloat16):
                unit.last(unit.first(x[:4]))
                cast.set()
                over.wait(5)

        other = threading.Thread(target=elsewhere, daemon=True)
        with attach(model, choices, sentinels="sample"):
            for step in range(4):
                if step == 2:
                    other.start()
                    cast.wait()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(1.1)
                model.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).square().sum()
                loss.backward()
                found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    expected = trained({})
    try:
        assert all(map(torch.equal, expected, trained({"0": from_label(choice)})))
    except RerunMismatch as error:  # it was of what the weights had been
        assert "0" in error.message


def _write(h: Tensor, step: int) -> Tensor:
    h = torch.tanh(h)
    y = torch.exp(h * 0.1) * h
    if step == 3:
        h.data.mul_(0.5)
    return y * h


def _write_by_numpy(h: Tensor, step: int) -> Tensor:
    y = torch.exp(h * 0.1) * h
    if step == 3:
        array = y.detach().numpy()
        array *= 0.5
    return y * y.sin()


def _caught(h: Tensor, step: int) -> Tensor:
    h = torch.sigmoid(h)
    if step >= 3:
        try:
            torch.mm(h, torch.ones(7, 7))
        except RuntimeError:
            h = h * 2
    return h.exp()


def _raised_by_numbers(h: Tensor, step: int) -> Tensor:
    """The very function that returned something, given the same, raises where the number is not positive."""
    try:
        torch.linalg.cholesky(h.detach()[:1, :1])
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


OPS = torch.library.Library("autockpt_odd", "FRAGMENT")
OPS.define("scale(Tensor x) -> Tensor")
OPS.impl("scale", lambda x: x.exp() * (1 + 0.1 * NOW[0]), "CompositeImplicitAutograd")


def _code_of_an_op(h: Tensor, step: int) -> Tensor:
    return torch.ops.autockpt_odd.scale(h).sin()


class _Scaling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func is torch.ops.aten.tanh.default else out


def _in_a_mode(mode: Callable[[], Any], late: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """From the fourth step on ``late`` is made in a mode: what was dropped before was not."""

    def then(h: Tensor, step: int) -> Tensor:
        h = torch.sigmoid(torch.tanh(h)).exp()
        if step >= 3:
            with mode():
                late(h)
        return h.sin() * h

    return then


def _scaled(h: Tensor, step: int) -> Tensor:
    h = torch.sigmoid(torch.tanh(h)).exp()
    with _Scaling() if step >= 3 else nullcontext():
        return h * torch.tanh(h)


class _Rows(nn.Module):
    """Uses those weights that a tensor without a size says."""

    def __init__(self, take: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.bank, self.take = nn.Parameter(torch.linspace(0, 1, 8 * 96 * 32).reshape(8, 96, 32)), take

    def forward(self, h: Tensor, step: int) -> Tensor:
        return (h * torch.sin(self.take(self.bank, (h.detach().sum() * 1e3).long() % 8)[: len(h)])).exp()


def _matches(h: Tensor, step: int) -> Tensor:
    """No function saves the rows that it picks, only what is made from them."""
    rows = h.detach()[h[:, 0] > 0]
    return torch.cat([h[:32] * (rows.T @ rows).sin(), h[32:]])


def _computed_in_vain(h: Tensor, step: int) -> Tensor:
    """When it goes another way, the graph of its first functions is gone."""
    torch.tanh(h).exp()
    return h.exp() if step < 3 else h.sin().exp()


def _in_another_precision(h: Tensor, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=step >= 3):
        weights = (h.detach() @ h.detach().T).float()
    return weights.sigmoid() * h.sin().sum(1)


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
    "the sign of zero": lambda h, step: torch.copysign(h, 0.0 if step < 3 else -0.0).exp() * h,
    "an int in the place of a bool": lambda h, step: (h * (True if step < 3 else 1)).exp(),
    "another name of an argument": lambda h, step: torch.clamp(h, **{"min" if step < 3 else "max": 0.1}).exp() * h,
    "one named argument less": lambda h, step: torch.clamp(h, min=-0.1, **({"max": 0.1} if step < 3 else {})).exp() * h,
    "other numbers in a tuple": lambda h, step: torch.roll(h, (1, 2 if step < 3 else 3), (0, 1)).exp() * h,
    "another tensor in a list": lambda h, step: (
        a := h.sin(),
        b := h.cos(),
        torch.stack([a if step < 3 else b, a]).exp().sum(0) * b,
    )[-1],
    "another branch after a graph that nobody needs": _computed_in_vain,
    "a float in the place of an equal int": lambda h, step: (
        h * (torch.full(h.shape, 2**24 + 1 if step < 3 else 2.0**24 + 1) % 2).float().sin().exp()
    ),
    "another branch": lambda h, step: torch.sigmoid(h).exp() if step < 3 else torch.tanh(h).exp(),
    "another order": lambda h, step: (h.sin() if step < 3 else h.cos()) * (h.cos() if step < 3 else h.sin()),
    "another tensor": lambda h, step: (a := h.sin(), b := h.cos(), (a if step < 3 else b).exp() * a)[-1],
    "one more at the end": lambda h, step: h.exp() if step < 3 else h.exp().exp(),
    "what a value decides": lambda h, step: h.exp() if h.detach().sum().item() > step - 3 else h.sin().exp(),
    "as many rows as a value says": lambda h, step: torch.cat([h.exp() * h, h[h[:, 0] > 0].sin().exp()])[:64],
    "rows without a gradient, as many as a value says": _matches,
    "the weights that a tensor says": _Rows(lambda bank, at: bank[at]),
    "the weights up to what a tensor says": _Rows(lambda bank, at: bank[at : at + 1][0]),
    "the parts that a tensor says": _Rows(lambda bank, at: bank.flatten(0, 1).tensor_split(at.reshape(1) + 1)[1]),
    "the slope that a tensor says": lambda h, step: F.leaky_relu(h - 1.0, h.detach().mean().abs()).sin().exp(),  # type: ignore[arg-type]
    "a constant from outside": lambda h, step: h * torch.full((32,), 1.0 + step).exp(),
    "dropout": lambda h, step: F.dropout(h, 0.3).exp() * F.dropout(h, 0.1 * step),
    "a write to a tensor of its own": lambda h, step: (h * 2.0).mul_(1.5).exp(),
    "a write that begins late": _write,
    "a write by NumPy that begins late": _write_by_numpy,
    "an error that is caught": _caught,
    "an error that numbers decide": _raised_by_numbers,
    "fewer arguments": lambda h, step: h.sum(0).sin() * h if step < 3 else h.sum().sin() * h,
    "a list in the place of a tuple": lambda h, step: torch.tile(h, [1, 1] if step < 3 else (1, 1)).exp(),
    "what the code of an op does": _code_of_an_op,
    "gradients switched off late": _without_gradient,
    "a gradient taken inside": _inner_gradient,
    "a dispatch mode of the user's that begins late": _scaled,
    "inference mode that begins late": _in_a_mode(torch.inference_mode, lambda h: h.norm()),
    "fake tensors that begin late": _in_a_mode(FakeTensorMode, lambda h: torch.tanh(torch.empty(3))),
    "autocast that begins late where nothing is saved": lambda h, step: (
        h * _in_another_precision(h, step).sum(1)[:, None]
    ),
    "autocast that begins late": lambda h, step: (
        torch.autocast("cpu", torch.bfloat16, step >= 3).__call__(lambda t: (t @ t.T).sigmoid() @ t)(h * 0.1).float()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("choice", ["remake", '{"kind": "remake", "keep": ["**"]}'])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_whatever_changes_between_calls_is_right_or_refused(odd: str, choice: str, autocast: bool) -> None:
    if odd == "a write by NumPy that begins late":
        pytest.importorskip("numpy")
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


def test_a_call_that_follows_drops_what_the_first_did() -> None:
    storages: list[Any] = []

    def look(h: Tensor, step: int) -> Tensor:
        made = torch.tanh(h).exp()
        with torch._C.DisableTorchFunction():
            storages.append(weakref.ref(made.untyped_storage()))
        return made * h

    model = nn.Sequential(Unit(look))
    x = torch.randn(64, 32, requires_grad=True)
    with attach(model, {"0": from_label("remake")}, sentinels="off"):
        for _ in range(3):
            model(x).sum().backward()
        storages.clear()
        out = model(x)
        assert storages[0]() is None
        out.sum().backward()
