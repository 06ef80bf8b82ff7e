"""Small language models, and what losses make of their logits: for tests of choices for the output head."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import SAVE, Choice
from autockpt.workload import discover_head
from tests.policies.zoo import CASES

F = nn.functional


def head_of(model: nn.Module) -> str:
    head = discover_head(model)
    assert head is not None
    return head.name


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def both(
    make: Callable[[], nn.Module], run: Callable[[nn.Module], dict[str, Tensor]], choice: Choice
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What ``run`` returns under the choice, and plainly."""
    results = []
    for chosen in (choice, SAVE):
        model = make()
        torch.manual_seed(5)
        with attach(model, {head_of(model): chosen}):
            results.append(run(model))
    return results[0], results[1]


def away(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-12))


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Random states and buffers bit-equal, all else within tolerance of the longest gradient's rounding."""
    assert got.keys() == wanted.keys()
    longest = max((float(t.float().norm()) for n, t in wanted.items() if "gradient" in n), default=0.0)
    for name, tensor in wanted.items():
        if "random" in name or "buffer" in name:
            assert torch.equal(got[name], tensor), name
        elif float(tensor.float().norm()) > 1e-4 * longest or "loss" in name:
            assert away(got[name], tensor) <= tolerance, (name, away(got[name], tensor))


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bit for bit; what is no number is the same, too."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name].nan_to_num(7), tensor.nan_to_num(7)), name


def small_llama(**more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**{"vocab_size": 64, **sizes, **more})
        return transformers.LlamaForCausalLM(config)

    return make


def batch(**more: Any) -> dict[str, Any]:
    return CASES["llama"].batch() | {"use_cache": False, **more}


def step(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    loss = model(**batch(**more)).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def _scaled(config: Callable[..., Any], **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        more = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        return transformers.AutoModelForCausalLM.from_config(config(vocab_size=64, **more, **sizes))

    return make


SCALED = {
    "gemma2": _scaled(transformers.Gemma2Config, head_dim=8, final_logit_softcapping=2.0),
    "granite": _scaled(transformers.GraniteConfig, logits_scaling=4.0),
    "cohere": _scaled(transformers.CohereConfig, logit_scale=0.25, pad_token_id=0),
}
"""Models that do something to logits before the loss."""


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted": lambda x, y: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, x.size(-1)), y[..., 1:].reshape(-1)),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "none": lambda x, y: (F.cross_entropy(x.reshape(-1, 64), y.flatten(), reduction="none") ** 2).mean(),
    "smoothed": lambda x, y: F.cross_entropy(x.view(4 * 48, -1), y.view(-1), label_smoothing=0.2, ignore_index=3),
    "steps": lambda x, y: F.cross_entropy(torch.tanh(x.to(torch.float64) / 3).mul(2)[:, 3].float(), y[:, 3]),
    "mask": lambda x, y: F.cross_entropy(x[y > 9], y[y > 9]),
    "module": lambda x, y: nn.CrossEntropyLoss()(2.0 * x.to(x.device).float().view(-1, 64) * 2, y.view(-1)),
}


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log softmax": lambda x, y: F.nll_loss(F.log_softmax(x.float(), -1).view(-1, 64), y.view(-1)),
    "classes first": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "weights": lambda x, y: F.cross_entropy(x.view(-1, 64), y.view(-1), weight=torch.arange(64).to(x.dtype)),
    "probabilities": lambda x, y: F.cross_entropy(x.view(-1, 64), F.one_hot(y.view(-1), 64).to(x.dtype)),
    "part of the vocabulary": lambda x, y: F.cross_entropy(x[..., :32].reshape(-1, 32), y.view(-1) % 32),
    "another view": lambda x, y: F.cross_entropy(x.view(-1, 32), y.view(-1).repeat(2) % 32),
    "a learned scale": lambda x, y: F.cross_entropy((x * torch.ones(1)).view(-1, 64), y.view(-1)),
    "in place": lambda x, y: F.cross_entropy(x.div_(2).view(-1, 64), y.view(-1)),
    "assignment": lambda x, y: _assigned(x, y),
    "a list": lambda x, y: torch.stack([row.logsumexp(-1).mean() for row in x]).sum(),
    "both": lambda x, y: F.cross_entropy(x.view(-1, 64), y.view(-1)) + x.logsumexp(-1).square().mean(),
    "an autograd function": lambda x, y: Square.apply(x).mean(),  # type: ignore[union-attr]
}


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    x[:, :, 60:] = -30.0
    return F.cross_entropy(x.view(-1, 64), y.clamp(max=59).view(-1))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]
