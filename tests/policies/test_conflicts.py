"""What works under plain training and not under a choice is refused by name, with what to do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds
from tests.errors import raises
from tests.policies.zoo import Unit, assert_as_plain, on, trained

KINDS = sorted(set(choice_kinds("block")) - {"save", "compile_budget"})


def learning(unit: Any, x: Tensor) -> Tensor:
    """Takes a gradient by torch.func, as layers do that learn while they are used."""
    slope: Any = torch.func.grad(lambda t: t.sin().sum())(x.detach())
    return unit.linear(x * slope)


def without_hooks(unit: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("not in here"):
        return unit.linear(x).tanh()


def masked(unit: Any, x: Tensor, mask: Tensor) -> Tensor:
    return unit.linear(x + mask).sin()


def nested(unit: Any, x: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([unit.linear(x)[:3], unit.linear(x)[3:]])
    return torch.nested.to_padded_tensor(parts * parts, 0.0)


class Masking(nn.Sequential):
    """Gives its layers a mask that was made in inference mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            mask = torch.ones(8)
        for layer in self:
            x = layer(x, mask)
        return x


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())
        self.linear, self.traced = nn.Linear(64, 64), torch.jit.trace(layers, torch.randn(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.traced(self.linear(x))


def rrelu() -> nn.Module:
    """Its kernel writes slopes after autograd has saved them: copies, or a second run that ends there, were wrong."""
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.RReLU()))


# a model whose unit is 0, the choices that are equal to plain training on it, and what the error of others names
ODD: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], tuple[str, ...]]] = {
    "torch.func": (lambda: nn.Sequential(Unit(learning), Unit(learning)), (), ("torch.func", "Use `save` on 0")),
    "hooks switched off": (lambda: nn.Sequential(Unit(without_hooks)), (), ("0 ",)),
    "inference mode": (lambda: Masking(Unit(masked), Unit(masked)), ("offload", "remake"), ("torch.inference_mode",)),
    "rrelu": (lambda: nn.Sequential(rrelu()), ("remake",), ("0.1.0", "RReLU")),
    "torchscript": (
        lambda: nn.Sequential(Scripted(), nn.Linear(64, 64)),
        ("offload",),
        ("0.traced", "TorchScript", "`save` or `offload` on 0"),
    ),
    "nested": (lambda: nn.Sequential(Unit(nested, 64)), tuple(kind for kind in KINDS if kind != "remake"), ("0 ",)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_equal_or_refused_by_name(name: str, kind: str) -> None:
    make, equal, named = ODD[name]
    width = 8 if name in ("torch.func", "hooks switched off", "inference mode") else 64
    batch = lambda: torch.randn(8, width)  # noqa: E731
    if kind in equal:
        assert_as_plain(make, on("0", kind), batch)
        return
    with raises(ConflictError, *named):
        trained(make, on("0", kind), batch)
    if name == "torchscript":
        assert_as_plain(make, on("1", kind), batch)  # others are free


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_are_switched_off_around_a_model(kind):
    around = lambda: torch.autograd.graph.disable_saved_tensors_hooks("not around it")  # noqa: E731
    with raises(ConflictError, "1 "):
        trained(
            lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            on("1", kind),
            lambda: torch.randn(4, 8),
            around=around,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_copy_of_a_units_attributes_does_not_use_its_weights(kind, hooked):
    """As the library `higher` makes them: again, and then attribute by attribute."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    other, x = nn.Linear(8, 8), torch.randn(4, 8)
    if hooked:
        other.register_forward_hook(lambda *_: None)
    around = type("Around", (nn.Sequential,), {})(model[1])
    with attach(model, on("1", kind)):
        for copied in (other, around):
            copied.__dict__.update({k: v for k, v in vars(model[1]).items() if not k.startswith("_")})
            with raises(ConflictError):
                copied(x)
        assert torch.equal(copy.copy(model[1])(x), model[1](x))
