"""Outputs that a kernel of Triton's may have written to are not handed out: no version counter tells of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.checkpointing.kept_outputs import given_up
from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice
from tests.policies.zoo import assert_equal


class Kernel:
    """Stands for ``triton.runtime.jit.JITFunction``: writes where torch does not see it."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def run(self, *args: Any, grid: Any = None) -> None:
        self.fn(*args)


OPS = torch.library.Library("autockpt_kernels", "FRAGMENT")
OPS.define("double(Tensor x) -> Tensor")
OPS.define("multiply(Tensor a, Tensor b, Tensor out) -> Tensor")


def _double(x: Tensor) -> Tensor:
    x.detach().numpy()[...] *= 2
    return torch.empty(0)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    out.detach().numpy()[...] = (a.detach() * b.detach()).numpy()
    return torch.empty(0)


OPS.impl("double", _double, "CompositeExplicitAutograd")
OPS.impl("multiply", _multiply, "CompositeExplicitAutograd")


def doubled(x: Tensor, _: int) -> None:
    """By an op: no code of Python's tells what a kernel writes to."""
    torch.ops.autockpt_kernels.double(x)


def _swiglu_forward_kernel(a: Tensor, b: Tensor, out: Tensor, _: int) -> None:
    torch.ops.autockpt_kernels.multiply(a, b, out)


def here(run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    run(*args, **kwargs)


def in_a_thread(run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    thread = threading.Thread(target=run, args=args, kwargs=kwargs)
    thread.start()
    thread.join()


class Doubled(torch.autograd.Function):
    """In place, as Liger's rotary embeddings are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[..., None]) -> Tensor:
        launch(Kernel(doubled).run, x, x.stride(0), grid=(1,))
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty_like(a)
        Kernel(_swiglu_forward_kernel).run(a, b, out, a.stride(0), grid=(1,))
        ctx.save_for_backward(a, b)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a


class Block(nn.Module):
    def __init__(self, launch: Callable[..., None]) -> None:
        super().__init__()
        self.launch = launch
        self.query, self.gate, self.up = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        turned = Doubled.apply(self.query(x), self.launch)
        return x + Product.apply(self.gate(turned), self.up(turned)).sin()


@pytest.mark.parametrize("launch", [here, in_a_thread])
@pytest.mark.parametrize(
    ("choice", "lost"),
    [
        ("recompute", 0),
        ({"kind": "selective", "keep": ["query"]}, 1),
        ({"kind": "selective", "keep": ["gate", "up"]}, 0),
        ("selective", 1),
    ],
    ids=str,
)
def test_what_a_kernel_may_have_written_to_is_made_again(
    choice: Any, lost: int, launch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=Kernel))  # type: ignore[arg-type]

    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(launch), Block(launch))
        x = torch.randn(4, 8)
        found = {}
        with attach(model, choices, sentinels="off"), given_up() as counts:
            for step in range(3):
                model(x).sum().backward()
                found |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert sum(counts.values()) == lost * len(choices) * 3
        return found

    plain = gradients({})
    assert_equal(gradients({"0": parse_choice(choice), "1": parse_choice(choice)}), plain)
    assert Kernel.run.__name__ == "run" and Kernel.__dict__["run"].__qualname__ == "Kernel.run"
