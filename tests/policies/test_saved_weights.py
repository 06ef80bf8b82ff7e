"""What a custom autograd function sets in its backward on a tensor that it saved is set on that tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, parse_choice
from tests.policies.heads import Square

D = 96  # more than what offload leaves where it is
SMALLER = {"kind": "segment", "size": 2}
KINDS = ["recompute", "keep_attention", "selective", "offload", "recompute_offload", SMALLER]


class Fused(torch.autograd.Function):
    """Adds to a weight's own accumulator, as fused kernels do, or makes one there, and reads what was set on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, prompt: Tensor, frozen: Tensor, where: str) -> Tensor:
        ctx.save_for_backward(x, weight, prompt, frozen, None)
        ctx.where = where
        return x @ weight.T + prompt @ frozen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        x, weight, prompt, frozen, nothing = ctx.saved_tensors
        assert nothing is None
        for leaf, new in ((weight, gradient.T @ x), (prompt, gradient @ frozen.T)):
            before = getattr(leaf, ctx.where)
            setattr(leaf, ctx.where, new if before is None else before + new)
        frozen.reads += 1
        return gradient @ weight, None, None, None, None


class Block(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.b, self.where = nn.Linear(D, D, bias=False), nn.Linear(D, D), where
        self.prompt = [torch.randn(D, D).requires_grad_()]
        self.frozen = nn.Parameter(torch.randn(D, D), requires_grad=False)
        self.frozen.reads = 0
        self.a.weight.main_grad = self.prompt[0].main_grad = None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(Fused.apply(x, self.a.weight, self.prompt[0], self.frozen, self.where)))


def trained(where: str, choice: Any = None) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(where), Block(where))
    with attach(model, {} if choice is None else {"0": choice, "1": choice}, sentinels="all"):
        for _ in range(4):
            model(torch.randn(D, D)).pow(2).mean().backward()
    leaves = [leaf for block in model for leaf in (*block.parameters(), block.prompt[0])]
    return [getattr(leaf, name, None) for leaf in leaves for name in ("grad", "main_grad", "reads")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("where", ["grad", "main_grad"])
def test_what_backward_sets_on_saved_tensors_reaches_leaves(where, kind):
    choice = parse_choice(kind if isinstance(kind, dict) else {"kind": kind})
    for got, wanted in zip(trained(where, choice), trained(where), strict=True):
        assert got == wanted if not isinstance(wanted, Tensor) else torch.equal(got, wanted)


class Squared(Square):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        Squared.given += ctx.saved_tensors  # type: ignore[attr-defined]
        return Square.backward(ctx, *gradients)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((D, D), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * Squared.apply(self.weight)


def test_gradients_of_gradients_lead_to_the_weight():
    unit = Scaled()
    Squared.given = []  # type: ignore[attr-defined]
    model = nn.Sequential(unit)
    with attach(model, {"0": RECOMPUTE}):
        (first,) = torch.autograd.grad(model(torch.ones(D, D)).sum(), [unit.weight], create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), [unit.weight])
    assert Squared.given == [unit.weight] and bool((second == 2).all())  # type: ignore[attr-defined]


class Rows(torch.autograd.Function):
    """Saves a view that its forward has made of what it was given, as PEFT's C3A and Liger's kernels do, and more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(-1, D), leaf)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, leaf = ctx.saved_tensors
        assert rows.is_leaf and leaf.is_leaf
        return gradients[0] * 2, None


def test_views_and_odd_layouts_are_as_they_were_saved():
    inside = nn.Linear(D, D)
    with attach(nn.Sequential(inside), {"0": RECOMPUTE}):  # which outlives it, in all of the process
        inside(torch.ones(D)).sum().backward()
    jagged = torch.nested.nested_tensor([torch.ones(2, D)], layout=torch.jagged)
    for leaf in (torch.eye(D).to_sparse(), torch.eye(D).to_sparse_csr(), torch.eye(D).to_mkldnn(), jagged):
        for x in (given := torch.ones(3, D, requires_grad=True), given * 1):
            Rows.apply(x, leaf.requires_grad_()).sum().backward()
        assert bool((given.grad == 4).all())
