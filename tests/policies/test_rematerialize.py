"""remake: what is dropped, what is kept, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, parse_choice
from tests.device import DEVICE
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal, plain, train

KEEPS = ((), ("**",), ("fused_attention",), ("mlp.gate_proj", "self_attn.q_proj"))


def remake(**options: Any) -> Choice:
    return parse_choice({"kind": "remake", **options})


class Unit(nn.Module):
    """A linear layer, and then what a test wants."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.then, self.last = nn.Linear(64, 64), then, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.then(self.first(x)))


def model_of(then: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Unit(then), Unit(then)).to(DEVICE)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(torch.randn(128, 64).to(DEVICE)).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Heavy(TorchDispatchMode):
    """Counts matrix products and attentions outside and inside of backward while gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.again = self.attentions = self.attentions_again = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and torch.is_grad_enabled():
            self.again, self.forward = self.again + in_backward, self.forward + (not in_backward)
        elif "scaled_dot_product" in str(func) and "backward" not in str(func):
            self.attentions_again += in_backward
            self.attentions += not in_backward
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS, ids=str)
@pytest.mark.parametrize("within", [(), ("mlp",), ("input_layernorm", "mlp.act_fn")], ids=str)
def test_any_set_is_bit_equal(keep: tuple[str, ...], within: tuple[str, ...]) -> None:
    case = CASES["llama"]
    model = case.make()
    with attach(model, case.choices(model, remake(keep=keep, within=within))):
        assert_equal(train(model, case, "bf16"), plain(case, "bf16"))


@pytest.mark.parametrize(("keep", "again"), [((), 2), (("fused_attention",), 2), (("**",), 0), (("first",), 0)])
def test_products_that_are_kept_do_not_run_again(keep: tuple[str, ...], again: int) -> None:
    model = model_of(torch.sin)
    with attach(model, dict.fromkeys(("0", "1"), remake(keep=keep))), Heavy() as heavy:
        gradients(model)
    assert (heavy.forward, heavy.again) == (4, again)


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
    wanted, model = gradients(model_of(then)), model_of(then)
    with attach(model, dict.fromkeys(("0", "1"), remake(keep=keep))):
        assert_equal(gradients(model), wanted)


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
        gradients(model)
