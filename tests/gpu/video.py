"""A video transformer's blocks on tens of thousands of tokens, where attention is nearly all of the arithmetic."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention of all tokens to all and an MLP, scaled, shifted and gated by the time, as in DiT."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(size, elementwise_affine=False) for _ in range(2))
        self.query_key = nn.ModuleList(nn.RMSNorm(size // heads) for _ in range(2))
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU("tanh"), nn.Linear(4 * size, size))
        self.modulation = nn.Parameter(torch.randn(6, size) / size**0.5)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``x``: (batch, tokens, size), ``time``: (6, size)."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (self.modulation + time).unbind()
        x = x + gate * self._attention(self.norms[0](x) * (1 + scale) + shift)
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        normed = (norm(part) for norm, part in zip(self.query_key, (query, key), strict=True))
        mixed = functional.scaled_dot_product_attention(*normed, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Video(nn.Module):
    """Blocks alone; the loss is the mean squared difference to the target."""

    def __init__(self, size: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size, heads) for _ in range(layers))

    def forward(self, x: Tensor, time: Tensor, target: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, time)
        return {"loss": functional.mse_loss(x, target)}


def video(seq_len: int = 72_000, size: int = 3072, layers: int = 6) -> tuple[nn.Module, dict[str, Any]]:
    """``seq_len`` tokens of one video, in bf16; heads of 128."""
    model = Video(size, size // 128, layers).to(torch.bfloat16)
    x, target = torch.randn(2, 1, seq_len, size, dtype=torch.bfloat16)
    return model, {"x": x, "time": torch.randn(6, size, dtype=torch.bfloat16), "target": target}


def small_video() -> tuple[nn.Module, dict[str, Any]]:
    """The same in small, for a CPU."""
    return video(seq_len=512, size=128, layers=3)
