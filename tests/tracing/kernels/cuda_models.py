"""Factories of small models whose step takes other kernels on CUDA than on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, LENGTH, WIDTH = 4, 80, 64


class Block(nn.Module):
    """Attention and an MLP, both with dropout."""

    def __init__(self, masked: bool, rate: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.RMSNorm(WIDTH), nn.Dropout(rate)
        self.masked, self.rate = masked, rate

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.ones(x.size(0), 1, LENGTH, LENGTH, dtype=torch.bool).tril() if self.masked else None
        out = F.scaled_dot_product_attention(q, k, v, mask, self.rate, is_causal=mask is None)
        return x + self.drop(self.out(out.transpose(1, 2).flatten(2)))


def _made(masked: bool, rate: float, dtype: torch.dtype):
    model = nn.Sequential(*(Block(masked, rate) for _ in range(3))).to(dtype)
    return model.train(), torch.randn(2, LENGTH, WIDTH, dtype=dtype), lambda m, b: m(b).sum()


def causal_bf16():
    return _made(False, 0.1, torch.bfloat16)


def causal_fp32():
    return _made(False, 0.1, torch.float32)


def masked_bf16():
    return _made(True, 0.0, torch.bfloat16)


class Gate(nn.Module):
    """A softmax between two products, straight on the 16-bit result of the first under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).softmax(-1))


def _gates() -> nn.Module:
    return nn.Sequential(*(Gate() for _ in range(3))).train()


def gates():
    return _gates(), torch.randn(64, WIDTH), lambda m, b: m(b).sum()


def gates_under_cuda_autocast():
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(batch).sum()

    return _gates(), torch.randn(64, WIDTH), step
