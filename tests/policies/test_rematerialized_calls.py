"""Calls of `remake` that go by what earlier ones did: as long as they do the same, and no further."""

import copy
import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autockpt.checkpointing import recorded_call
from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.errors import AutockptError, RerunMismatch
from autockpt.policies.rematerialize import recipes_known
from autockpt.runtime import attach, remove
from autockpt.schema.choices import parse_choice
from tests.errors import raises
from tests.policies.zoo import assert_as_plain, bytes_alive_after, on

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


# --- what is kept, and which calls are recorded

LARGE = 128 * 64 * 4  # bytes of an input


class Way(enum.Enum):
    SINE, COSINE = 1, 2


class Mlp(nn.Module):
    """Its ``scale`` is an attribute; ``then`` may do anything with what is in between."""

    def __init__(self, then: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.then, self.scale = nn.Linear(64, 256), nn.Linear(256, 64), then, 1.0

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self, "scale", None) or 1.0
        return x + self.down(self.then(F.silu(self.up(x)) * (scale if isinstance(scale, float) else scale[0])))


def gradients(layer: nn.Module, length: int, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(length, 64, requires_grad=True)
    return list(torch.autograd.grad(layer(x).square().sum(), [x, *(p for p in layer.parameters() if p.requires_grad)]))


@pytest.fixture
def recorded(noted: list[Any]) -> Callable[[nn.Module, Iterable[int]], list[int]]:
    """The numbers of the calls of a planned layer that are recorded. Gradients of all are plain training's."""

    def calls(layer: nn.Module, lengths: Iterable[int]) -> list[int]:
        plain, found = copy.deepcopy(layer), list[int]()
        remove(plain)
        for number, length in enumerate(lengths, 1):
            before = len(noted)
            given = gradients(layer, length, number)
            found += [number] * (len(noted) > before)
            assert all(map(torch.equal, given, gradients(plain, length, number))), number
        return found

    return calls


def planned(layer: nn.Module, *keep: str, traced: bool = False) -> nn.Module:
    session = attach(nn.Sequential(layer), {"0": parse_choice({"kind": "remake", "keep": keep})}, sentinels="off")
    if traced:
        session.sentinels.in_mid_training = True
    return layer


@pytest.mark.parametrize(("keep", "kept"), [((), 2 * LARGE), (("**",), 6 * LARGE)])
def test_recorded_calls_and_later_ones_keep_the_same(keep: tuple[str, ...], kept: int) -> None:
    x = torch.randn(128, 64, requires_grad=True)
    plain, layer = bytes_alive_after(lambda: Mlp()(x)), planned(Mlp(), *keep)
    found = [bytes_alive_after(lambda: layer(x)) for _ in range(8)]
    assert len(set(found)) == 1 and found[0] < kept < plain


def test_what_a_module_inside_is_given_may_be_all_that_is_kept() -> None:
    """A 16-bit residual of which autograd saves a cast to 32 bits."""

    class Normed(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            wide = h.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = Normed(), nn.Linear(64, 64).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm((x + torch.randn_like(x)).bfloat16()))

    assert_as_plain(lambda: nn.Sequential(Residual()), on("0", {"kind": "remake", "keep": ["**"]}), rows_of_64, 8)
    layer, x = planned(Residual(), "**"), rows_of_64().requires_grad_()
    assert all(bytes_alive_after(lambda: layer(x)) < 1.1 * LARGE for _ in range(3))  # it and the output, in 16 bits
    remove(layer)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in layer.modules())


def rows_of_64() -> Tensor:
    return torch.randn(128, 64)


def test_recordings_become_seldom(recorded: Any) -> None:
    assert recorded(planned(Mlp()), [8] * 40) == [1, 2, 7, 16, 33]


def test_lengths_of_a_steady_unit_are_recorded_once_and_forgotten_late(recorded: Any) -> None:
    with recipes_known({}):
        layer = planned(Mlp(), traced=True)
        lengths = [9, 9, *range(10, 40), *range(10, 40)]
        assert recorded(layer, lengths) == [1, *range(3, 33)]
        assert recorded(layer, [*range(40, 40 + recorded_call._MOST), 10])[-1] == recorded_call._MOST + 1


def test_what_differs_from_the_first_on_is_always_recorded(recorded: Any) -> None:
    layer = planned(Mlp(lambda h: (h * NOW[0]).sin()))
    found = []
    for NOW[0] in range(12):
        found += recorded(layer, [8])
    assert found == [1] * 12


_NUMBERS = [(1.0, 0.5), (np.float64(1.0), np.float64(0.5)), ((1.0,), (0.5,)), (None, 0.5), ([1.0], 0.5), (..., 0.5)]
_NUMBERS += [([1.0], [0.5]), ({0: 1.0}, {0: 0.5}), ((1.0,) * 65, (0.5,) * 65)]


@pytest.mark.parametrize(("first", "then"), _NUMBERS, ids=lambda value: str(value)[:20])
def test_a_number_of_the_modules_own_may_change(first: Any, then: Any, recorded: Any) -> None:
    layer: Any = Mlp()
    layer.scale = first
    if first is Ellipsis:  # it is set later
        del layer.scale
    planned(layer)
    recorded(layer, [8] * 4)
    for layer.scale in (then, 0.25):
        assert recorded(layer, [8] * 4)[0] == 1


def test_a_tensor_in_the_place_of_none_tells_no_calls_apart(recorded: Any) -> None:
    layer: Any = Mlp(lambda h: h if layer.mask is None else h * layer.mask)
    layer.mask = None
    planned(layer)
    recorded(layer, [8] * 4)
    assert [recorded(layer, [8]) for layer.mask in torch.rand(2, 256)] == [[1], []]


def test_weights_may_be_tied_and_untied(recorded: Any) -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    layer, weight = planned(nn.Sequential(first, nn.Tanh(), second, nn.Tanh())), second.weight
    recorded(layer, [64] * 4)
    for second.weight in (first.weight, weight):
        recorded(layer, [64] * 8)


def test_a_hook_may_be_registered_and_removed(recorded: Any) -> None:
    layer = planned(Mlp())
    recorded(layer, [8] * 4)
    for factor in (0.5, 0.25):
        hook = layer.up.register_forward_hook(lambda *given, by=factor: given[2] * by)  # type: ignore[union-attr]
        recorded(layer, [8] * 4)
        hook.remove()
    recorded(layer, [8])


def test_a_tensor_of_the_modules_own_may_get_longer(recorded: Any) -> None:
    layer: Any = Mlp(lambda h: h * layer.rows[1:].sum(0))
    layer.rows = torch.rand(4, 256)
    recorded(planned(layer), [8] * 4)
    layer.rows = torch.rand(5, 256)
    recorded(layer, [8])


class Named(NamedTuple):
    scale: float


@dataclass(slots=True)
class Options:
    scale: float


_GIVEN = [(1.0, 0.5), (np.float32(1.0), np.float32(0.5)), (Way.SINE, Way.COSINE)]
_GIVEN += [(kind(1.0), kind(0.5)) for kind in (Named, Options)] + [(range(1), range(2)), (slice(1), slice(2))]


@pytest.mark.parametrize(("first", "then"), _GIVEN, ids=str)
def test_a_number_or_name_that_a_layer_is_given_may_change(first: Any, then: Any, recorded: Any) -> None:
    class Given(Mlp):
        def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
            x, given = super().forward(x), getattr(given, "scale", getattr(given, "stop", given))
            return (x.sin() if given is Way.SINE else x.cos() if given is Way.COSINE else x * float(given)).sin()

    class Giving(nn.Module):
        gives = first

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.gives)

    model: Any = Giving()
    model.inner = planned(Given())
    recorded(model, [8] * 4)
    model.gives = then
    assert recorded(model, [8] * 4)[0] == 1


def test_a_weight_may_be_frozen_and_train_again(recorded: Any) -> None:
    class Scaling(Mlp):
        first: Tensor
        second: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.sin() * self.first).sin() * self.second)

    layer: Any = Scaling()
    layer.first, layer.second = (nn.Parameter(torch.rand(8, 64)) for _ in range(2))
    recorded(planned(layer), [8] * 4)
    for trains in (False, True):
        layer.first.requires_grad_(trains)
        recorded(layer, [8] * 2)


def test_a_counter_does_not_tell_calls_apart(recorded: Any) -> None:
    class Counting(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    assert len(recorded(planned(Counting()), [8] * 6)) == 3  # its first taught that it counts


def test_another_branch_is_found_by_the_next_recording() -> None:
    now = [torch.sigmoid]
    layer = planned(Mlp(lambda h: now[0](h)))
    for _ in range(4):
        gradients(layer, 8, 0)
    now[0] = torch.tanh
    with raises(RerunMismatch, "0", "within the last"):
        for _ in range(recorded_call.RecordedUnit.gap + 1):
            gradients(layer, 8, 0)


# --- calls that differ


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
@pytest.mark.parametrize(
    ("choice", "autocast"), [("remake", False), ({"kind": "remake", "keep": ["**"]}, True)], ids=str
)
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
