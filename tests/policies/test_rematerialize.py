"""remake: what is dropped, what is kept, and what is refused."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, parse_choice
from tests.device import DEVICE
from tests.errors import raises
from tests.policies.zoo import CASES, Ops, assert_as_plain, assert_equal, number, on, plain, train, trained

KEEPS = ((), ("**",), ("fused_attention",), ("mlp.gate_proj", "self_attn.q_proj"))
LIBRARY = torch.library.Library("autockpt_test", "FRAGMENT")
LIBRARY.define("twice_(Tensor(a!) self) -> ()", tags=torch.Tag.pointwise)


@torch.library.impl(LIBRARY, "twice_", "CompositeExplicitAutograd")
def _twice(x: Tensor) -> None:
    x.mul_(2)


def remake(**options: Any) -> Choice:
    return parse_choice({"kind": "remake", **options})


class Unit(nn.Module):
    """A linear layer, and then what a test wants."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.then, self.last = nn.Linear(64, 64), then, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.then(self.first(x)))


def model_of(then: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Unit(then), Unit(then)).to(DEVICE)


def rows() -> Tensor:
    return torch.randn(128, 64).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS, ids=str)
@pytest.mark.parametrize("within", [(), ("mlp",), ("input_layernorm", "mlp.act_fn")], ids=str)
def test_any_set_is_bit_equal(keep: tuple[str, ...], within: tuple[str, ...]) -> None:
    case = CASES["llama"]
    model = case.make()
    with attach(model, case.choices(model, remake(keep=keep, within=within))):
        assert_equal(train(model, case, "bf16"), plain(case, "bf16"))


def under_switches(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return x.sin() * x.exp()


def under_flags(x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return torch.addmm(torch.zeros(64), x, torch.eye(64)).sin()


def of_parts(x: Tensor, *, whole: bool) -> Tensor:
    """Blank memory, as keys of latent attention are: a part of each head's and one of all heads."""
    made, constant = x.new_empty(128, 64), x.detach()
    made[:, :32].copy_(constant[:, :32].exp())
    if whole:
        made[:, 32:].copy_(constant[:, :32].sigmoid())
    return x.sin() * made


def written_by_an_op_of_its_own(x: Tensor) -> Tensor:
    made = x.detach().exp()
    torch.ops.autockpt_test.twice_(made)
    return x.sin() * made


@pytest.mark.parametrize(
    ("then", "keep", "op", "times"),
    [
        (torch.sin, (), "addmm", 1),
        (torch.sin, ("fused_attention",), "addmm", 1),
        (torch.sin, ("**",), "addmm", 0),
        (torch.sin, ("first",), "addmm", 0),
        (lambda x: x.sin().exp().tanh(), ("**",), "exp", 1),  # which two tensors need
        (lambda x: x.sin() * x.exp(), ("**",), "exp", 1),
        (lambda x: x.sin() * x.detach().exp().mul_(2), ("**",), "exp", 1),
        (partial(of_parts, whole=True), ("**",), "exp", 1),
        (partial(of_parts, whole=False), ("**",), "exp", 0),
        (under_switches, ("**",), "exp", 0),
        (under_flags, (), "addmm", 0),
        (written_by_an_op_of_its_own, ("**",), "exp", 0),
    ],
)
def test_what_runs_again(then: Callable[[Tensor], Tensor], keep: tuple[str, ...], op: str, times: int) -> None:
    """In each of two units: in recorded calls and in those that follow a recipe."""
    model = model_of(then)
    with attach(model, on("01", remake(keep=keep))):
        for _ in range(4):
            loss = model(rows()).square().sum()
            with Ops() as ops:
                loss.backward()
            assert number(ops.backward, f"aten.{op}.") == 2 * times


def negative(x: Tensor) -> Tensor:
    """A view whose numbers are the negatives of those in memory."""
    view = torch.view_as_complex(x.view(128, 32, 2)).conj().imag
    assert view.is_neg()
    return view


def overwritten_as_bits(x: Tensor) -> Tensor:
    """Backward needs its sine, not it."""
    made = x.detach().cos()
    bits, out = made.view(torch.int32), x * made.sin()
    del made
    bits.add_(1)
    return out


def copied_together(x: Tensor) -> Tensor:
    """Partly over itself, and read in between."""
    made = x.new_empty(128, 96)
    made[:, :64].copy_(x.sin())
    made[:, 64:].copy_(x[:, :32].cos())
    before = made.exp()
    return before[:, :64] * made.mul_(2).sin()[:, 32:]


@pytest.mark.parametrize(
    "then",
    [
        copied_together,
        overwritten_as_bits,
        lambda x: torch.relu_(x).exp(),
        lambda x: x.cos().mul_(2).sin(),
        lambda x: (x.sin() + x.exp()).add_(1).tanh(),
        lambda x: torch.cat([x.sin(), x.cos()], 1)[:, ::2].exp(),
        lambda x: x.t().exp().t().sigmoid(),
        lambda x: nn.functional.dropout(x.sin(), 0.3).exp(),
        lambda x: x.bfloat16().exp().float(),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(128, 32, 2)) * 1j).flatten(1).exp(),
        lambda x: torch.cat([negative(x.sin()) * negative(x.cos()), negative(x).clone().exp()], 1),
        lambda x: torch.cat([negative(x.sin()).reshape(64, 64).exp().sin().reshape(128, 32), x[:, ::2]], 1),
        lambda x: x.sin() + torch.inference_mode()(lambda: torch.ones(64, device=DEVICE).mul(2).sin())(),
        lambda x: (y := x.sin(), y * (y.detach().view(torch.int32) * 1e-9).sin())[1],
        lambda x: torch.sparse.mm(torch.eye(128, device=DEVICE).to_sparse() * 2.0, x.sin()).exp(),
        lambda x: (y := x.sin().tanh(), y.data.round_(), y.exp())[2],
    ],
)
@pytest.mark.parametrize("keep", [(), ("**",)], ids=str)
def test_changes_in_place_views_and_types_are_exact(then: Callable[[Tensor], Tensor], keep: tuple[str, ...]) -> None:
    assert_as_plain(partial(model_of, then), on("01", remake(keep=keep)), rows, 2)


def test_a_write_outside_of_the_modules_that_are_watched_is_seen() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x)).mul_(2) * x)

    assert_as_plain(lambda: nn.Sequential(Written()), on("0", remake(within=["inner"])), rows)


def test_nothing_looks_on_after_an_interrupt() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), Unit(sys.exit))).to(DEVICE)  # not an Exception either
    with attach(model, {"0": remake(within=["1"])}), pytest.raises(SystemExit):
        model(rows())
    assert not _get_current_dispatch_mode_stack()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_custom_autograd_functions_are_refused_by_name() -> None:
    model = model_of(Doubled.apply)
    with attach(model, {"0": remake()}), raises(ConflictError, "Doubled"):
        model(rows())


# --- ops that a dispatch mode changes are refused where one would look on, and work everywhere else

WATCHING = [parse_choice(c) for c in ("remake", {"kind": "remake", "keep": ["**"]})]
OTHERS = [parse_choice(c) for c in ("recompute", "selective", "offload", {"kind": "remake", "within": ["first"]})]


def pinv(x: Tensor) -> Tensor:
    return torch.linalg.pinv(torch.complex(x, x.sin())).real.T


def bilinear(x: Tensor) -> Tensor:
    return nn.functional.bilinear(x.float(), x.float(), torch.ones(64, 64, 64))


def sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(128).to_sparse(), x.float())


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
@pytest.mark.parametrize(
    ("choice", "returned"), zip([*WATCHING, *OTHERS], ["tensor", "tuple"] * 3, strict=True), ids=str
)
def test_torch_cond(choice: Choice, returned: str) -> None:
    def conditional(x: Tensor) -> Tensor:
        if returned == "tuple":
            return torch.cond(x.sum() > 0, lambda t: (t.sin(),), lambda t: (t.cos(),), (x,))[0]
        return x * torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    refused = choice.kind == "remake" and not choice.within
    with pytest.raises(ConflictError) if refused else nullcontext():
        assert_as_plain(lambda: nn.Sequential(Unit(conditional)), {"0": choice}, rows, 1)
