"""Small models that are no plain stack of blocks, each as a training step and its modules to choose for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.runtime import apply
from autockpt.workload import Step
from tests.policies.zoo import feature_step


class Convolutions(nn.Module):
    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.drop = nn.Dropout(0.1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.first(x)))
        return nn.functional.silu(self.second(self.drop(x)))


class UNet(nn.Module):
    """Skips from every level down to its level up; nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = Convolutions(3, 8), Convolutions(8, 16)
        self.mid = Convolutions(16, 24)
        self.up2, self.up1 = Convolutions(24 + 16, 16), Convolutions(16 + 8, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.avg_pool2d(first, 2))
        low = self.mid(nn.functional.avg_pool2d(second, 2))
        up = self.up2(torch.cat([nn.functional.interpolate(low, scale_factor=2), second], 1))
        return self.out(self.up1(torch.cat([nn.functional.interpolate(up, scale_factor=2), first], 1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 50)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        hidden, _ = self.gru(hidden)
        return self.out(hidden)


class Giant(nn.Module):
    """One block that does everything in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(16, 128), nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.enter(x)) * torch.sigmoid(self.gate(x))
        return self.leave(nn.functional.gelu(wide) + wide.sin())


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Giant()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def unet() -> Step:
    return _step(UNet(), torch.randn(2, 3, 32, 32), feature_step)


def recurrent() -> Step:
    return _step(Recurrent(), torch.randint(50, (4, 32)), feature_step)


def one_block() -> Step:
    return _step(OneBlock(), torch.randn(64, 16), feature_step)


def multimodal() -> Step:
    """LLaVA: a vision tower whose features go through a projector into a language model's sequence."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    vision = CLIPVisionConfig(num_hidden_layers=3, image_size=32, patch_size=8, **sizes)
    text = LlamaConfig(vocab_size=64, num_hidden_layers=2, num_key_value_heads=2, use_cache=False, **sizes)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, image_seq_length=16)
    ids = torch.randint(1, 63, (2, 24))
    ids[:, 2:18] = 63
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(2, 3, 32, 32)}
    return _step(LlavaForConditionalGeneration(config), batch)


def _step(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())
    return Step(model.train(), batch, loss=loss, optimizer=optimizer)


def gradients(step: Step, choices: Any) -> dict[str, Tensor]:
    """Those of one seeded step under choices, or a plan."""
    torch.manual_seed(5)
    with apply(step.model, choices):
        step.forward_backward()
    found = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
    step.release_gradients()
    return found


NAMED: dict[Callable[[], Step], str] = {
    unet: "down1,mid,up1",
    recurrent: "lstm,gru",
    one_block: "block",
    multimodal: "model.vision_tower,model.multi_modal_projector,model.language_model.layers.*",
}
"""The modules to choose for, by what makes the step."""
