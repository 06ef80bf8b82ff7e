"""Other ways to differentiate than one backward: forward-mode AD, forward over reverse, many gradients at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import CHUNKED_LOSS, CHUNKED_SOFTMAX, Choice, choice_kinds, parse_choice
from tests.errors import raises

F = nn.functional
VOCABULARY = 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop, self.descends = nn.Dropout(0.2), False

    def forward(self, x: Tensor) -> Tensor:
        if self.descends:  # a step of the block's own, by a backward inside of its forward
            inner = x.detach().requires_grad_()
            self.first(inner).square().mean().backward(inputs=[inner])
            assert inner.grad is not None
            x = x - inner.grad
        return x + self.drop(self.second(torch.tanh(self.first(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(32, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def losses(logits: Tensor) -> Tensor:
    """One for each row of the batch."""
    flat = logits.view(-1, VOCABULARY)
    return F.cross_entropy(flat, torch.arange(len(flat)) % VOCABULARY, reduction="none").view(len(logits), -1).mean(1)


def under(choices: dict[str, Choice], run: Callable[[Model], list[Any]]) -> list[Any]:
    torch.manual_seed(0)
    model = Model()
    with attach(model, choices):
        return run(model)


def assert_as_plain(choices: dict[str, Choice], run: Callable[[Model], list[Any]]) -> None:
    for got, wanted in zip(under(choices, run), under({}, run), strict=True):
        assert torch.equal(got, wanted)


def with_tangents(model: Model) -> list[Any]:
    """Loss and its tangent, gradients of the weights, and a product of the Hessian with a vector."""
    x = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with forward_ad.dual_level():
        loss = losses(model(forward_ad.make_dual(x, torch.ones_like(x)))).sum()
        value, tangent = forward_ad.unpack_dual(loss)
        gradients = torch.autograd.grad(loss, [x, *model.parameters()])
        of_gradients = [forward_ad.unpack_dual(g) for g in gradients]
        return [value, tangent, *(part.detach() for pair in of_gradients for part in pair if part is not None)]


def many_at_once(model: Model) -> list[Any]:
    rows = losses(model(torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1))))
    return list(torch.autograd.grad(rows, list(model.parameters()), torch.eye(4), is_grads_batched=True))


def by_torch_func(model: Model) -> list[Any]:
    x = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1))
    model.eval()  # torch.func takes no random numbers by itself
    return [torch.func.grad(lambda t: losses(model(t)).sum())(x), *torch.func.jvp(model, (x,), (torch.ones_like(x),))]


each_kind = pytest.mark.parametrize("kind", sorted(choice_kinds("block")))


def of_blocks(kind: str) -> dict[str, Choice]:
    return dict.fromkeys(("layers.0", "layers.1"), parse_choice(kind))


everywhere = pytest.mark.parametrize(
    "choices",
    [
        *(pytest.param(of_blocks(kind), id=kind) for kind in sorted(choice_kinds("block"))),
        *(pytest.param({"lm_head": choice}, id=str(choice)) for choice in (CHUNKED_SOFTMAX, CHUNKED_LOSS)),
    ],
)


@everywhere
def test_forward_mode(choices: dict[str, Choice]) -> None:
    assert_as_plain(choices, with_tangents)


@everywhere
def test_transforms_of_torch_func(choices: dict[str, Choice]) -> None:
    assert_as_plain(choices, by_torch_func)


def exported(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (x,)).module()


def scripted(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, (x,), check_trace=False)


def made_of_ops(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return make_fx(lambda x: model(x))(x)


@everywhere
@pytest.mark.parametrize("make", [exported, scripted, made_of_ops])
def test_a_program_is_made_of_the_model_between_steps(make: Callable[..., Any], choices: dict[str, Choice]) -> None:
    def run(model: Model) -> list[Any]:
        program = make(model.eval(), torch.ones(4, 32, 32))
        losses(model.train()(torch.ones(4, 32, 32))).sum().backward()
        return [program(torch.full((4, 32, 32), 0.1)), *(parameter.grad for parameter in model.parameters())]

    assert_as_plain(choices, run)


@each_kind
@pytest.mark.parametrize("descends", [False, True])
def test_batched_gradients_with_dropout_are_exact_or_refused(descends: bool, kind: str) -> None:
    def run(model: Model) -> list[Any]:
        for layer in model.layers:
            layer.descends = descends
        return many_at_once(model)

    try:
        assert_as_plain(of_blocks(kind), run)
    except RuntimeError as error:  # vmap draws no random numbers
        assert "layers." in "".join(error.__notes__)


@pytest.mark.parametrize("choice", [CHUNKED_SOFTMAX, CHUNKED_LOSS], ids=str)
def test_many_gradients_at_once_are_refused_by_a_chunked_head(choice: Choice) -> None:
    with raises(ConflictError, "lm_head", "is_grads_batched", choice.kind):
        under({"lm_head": choice}, many_at_once)
