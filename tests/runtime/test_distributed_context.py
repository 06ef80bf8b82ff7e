"""PyTorch's own context parallelism over two processes (gloo): a plan on each rank, gradients bit-equal without one."""

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice
from tests.runtime.processes import needs_gloo, on_ranks

pytestmark = pytest.mark.slow
LENGTH, HEADS, SIZE = 32, 2, 8
AGAIN: list[Any] = ["recompute", "recompute_offload", {"kind": "selective", "keep": ["up"]}, "segment"]
NOT_AGAIN = ["remake", "offload"]  # whose backward runs no attention, so no ring of keys and values, once more


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """By CUDA's memory-efficient kernel, which is given to the CPU below: context parallelism knows none of the CPU's,
    and finds the function that it replaces by this name."""
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    return op(query, key, value, None, True, 0.0, is_causal)[0]


def _scores(query: Tensor, key: Tensor, is_causal: bool = False) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, float("-inf")) if is_causal else scores


def _forward(query: Tensor, key: Tensor, value: Tensor, *more: Any, **_: Any) -> Any:
    scores, none = _scores(query, key, *more[3:4]), torch.zeros((), dtype=torch.int64)
    return scores.softmax(-1) @ value, scores.logsumexp(-1), none, none.clone()


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any, **_: Any) -> Any:
    out, sums = more[1:3]
    shares = torch.exp(_scores(query, key, *more[7:8]) - sums[..., None])
    scores = shares * (gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)) * query.shape[-1] ** -0.5
    return scores @ key, scores.mT @ query, shares.mT @ gradient, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.qkv, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).unbind(2)
        made = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        x = x + made.transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


def work(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer() for _ in range(3))), torch.randn(2, LENGTH, HEADS * SIZE)
    mesh, plain, wrong = init_device_mesh("cpu", (2,)), _attention._templated_ring_attention, list[str]()
    rings = [0, 0]  # of forward, in forward and in backward

    @functools.wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        rings[torch._C._current_graph_task_id() != -1] += 1
        return plain(*args, **kwargs)

    def gradients(choice: Any) -> list[Tensor]:
        model.zero_grad()
        with attach(model, {f"{i}": parse_choice(choice) for i in range(3)}):
            for _ in range(3):
                part = x.clone()
                with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
                    model(part).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with (
        patch.object(nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        patch.object(_attention, "_templated_ring_attention", counted),
    ):
        for _ in range(3):
            model(x).square().mean().backward()
        whole = [p.grad for p in model.parameters() if p.grad is not None]
        wanted = gradients("save")
        if rings != [9, 0]:
            wrong.append(f"attention ran {rings} times in rings")
        for choice in (*AGAIN, *NOT_AGAIN):
            rings[:] = [0, 0]
            if not all(map(torch.equal, gradients(choice), wanted)):
                wrong.append(f"{choice} differs")
            if rings != [9, 0 if choice in NOT_AGAIN else 9]:
                wrong.append(f"{choice} ran {rings} rings")
    for gradient, all_of_it in zip(wanted, whole, strict=True):
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient / 2, all_of_it)
    return wrong


@needs_gloo
def test_gradients_are_bit_equal_under_context_parallelism(tmp_path):
    assert on_ranks(work, tmp_path) == []
