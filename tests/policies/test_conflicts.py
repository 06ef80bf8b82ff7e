"""What works under plain training and not under a choice is refused by name, with what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds, parse_choice
from tests.errors import raises

KINDS = sorted(set(choice_kinds("block")) - {"save", "compile_budget"})


class Learning(nn.Module):
    """Takes a gradient by torch.func in its forward, as layers do that learn while they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        slope: Any = torch.func.grad(lambda t: t.sin().sum())(x.detach())
        return self.linear(x * slope)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_torch_func(kind):
    model = nn.Sequential(Learning(), Learning())
    with attach(model, {"1": parse_choice(kind)}):
        with raises(ConflictError, "torch.func") as raised:
            model(torch.randn(4, 8))
        assert "Use `save` on 1" in str(raised.value)


class WithoutHooks(nn.Module):
    """Allows no hooks on saved tensors in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not in here"):
            return self.linear(x).tanh()


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_are_switched_off_inside_of_a_unit(kind):
    model = nn.Sequential(WithoutHooks(), WithoutHooks())
    with attach(model, {"1": parse_choice(kind)}), raises(ConflictError):
        model(torch.randn(4, 8))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    without = torch.autograd.graph.disable_saved_tensors_hooks("not around it")
    with attach(model, {"1": parse_choice(kind)}), without, raises(ConflictError, "1 "):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_copy_of_a_units_attributes_does_not_use_its_weights(kind, hooked):
    """As the library `higher` makes them: anew, and then attribute by attribute."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    other, x = nn.Linear(8, 8), torch.randn(4, 8)
    if hooked:
        other.register_forward_hook(lambda *_: None)
    with attach(model, {"1": parse_choice(kind)}):
        other.__dict__.update({k: v for k, v in vars(model[1]).items() if not k.startswith("_")})
        with raises(ConflictError):
            other(x)
        assert torch.equal(copy.copy(model[1])(x), model[1](x))


class Masking(nn.Sequential):
    """Gives its layers a mask that was made in inference mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            mask = torch.ones(8)
        for layer in self:
            x = layer(x, mask)
        return x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x + mask).sin()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_inference_mode_among_the_arguments(kind):
    model, x = Masking(Masked(), Masked()), torch.randn(4, 8)
    model(x).sum().backward()
    wanted = model[0].linear.weight.grad
    model.zero_grad()
    with attach(model, {"0": parse_choice(kind)}):
        if kind in ("offload", "remake"):
            model(x).sum().backward()
            assert torch.equal(model[0].linear.weight.grad, wanted)  # type: ignore[arg-type]
        else:
            with raises(ConflictError, "torch.inference_mode"):
                model(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_writes_after_autograd_has_saved(kind):
    """RReLU: copies of its slopes, or a second run that ends with the last saved tensor, would be wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.RReLU())))

    def gradient() -> Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        model(torch.randn(128, 64)).square().sum().backward()
        return next(model.parameters()).grad  # type: ignore[return-value]

    wanted = gradient()
    if kind == "remake":
        with attach(model, {"0": parse_choice(kind)}):
            assert torch.equal(gradient(), wanted)
        return
    with raises(ConflictError, "0.1.0", "RReLU"):
        attach(model, {"0": parse_choice(kind)})
    assert torch.equal(gradient(), wanted)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())
        self.linear, self.traced = nn.Linear(64, 64), torch.jit.trace(layers, torch.randn(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.traced(self.linear(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_torchscript(kind):
    """Its interpreter turns what ends a second run into an error of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(Scripted(), nn.Linear(64, 64))
    x = torch.randn(128, 64)

    def gradient() -> Tensor:
        model.zero_grad()
        model(x).square().sum().backward()
        return model[0].linear.weight.grad.clone()

    _, _, wanted = (gradient() for _ in range(3))  # its first calls run other code than later ones
    if kind == "offload":
        with attach(model, dict.fromkeys("01", parse_choice(kind))):
            assert torch.equal(gradient(), wanted)
        return
    with raises(ConflictError, "0.traced", "TorchScript") as raised:
        attach(model, {"0": parse_choice(kind)})
    assert "`save` or `offload` on 0" in str(raised.value)
    with attach(model, {"1": parse_choice(kind)}):  # others are free
        assert torch.equal(gradient(), wanted)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.nested.as_nested_tensor([self.linear(x)[:3], self.linear(x)[3:]])
        return torch.nested.to_padded_tensor(parts * parts, 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_nested_tensors_of_the_strided_layout(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(Nested()), torch.randn(8, 64)
    model(x).sum().backward()
    wanted, model[0].linear.weight.grad = model[0].linear.weight.grad, None
    with attach(model, {"0": parse_choice(kind)}):
        if kind == "remake":
            with raises(ConflictError):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
            assert torch.equal(model[0].linear.weight.grad, wanted)
