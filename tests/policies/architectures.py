"""Small transformers of other build than those of ``zoo``: one config each, with and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.device import DEVICE, here, random_state_kept
from tests.policies.zoo import language_step


@dataclass(frozen=True)
class Architecture:
    """``make(dropout)`` builds the model; dropout is a rate that the config takes where it knows any."""

    name: str
    make: Callable[[float], nn.Module]
    batch: Callable[[], Any]

    def build(self, dropout: float) -> nn.Module:
        with random_state_kept():
            torch.manual_seed(0)
            return self.make(dropout).train().to(DEVICE)

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        return language_step(model, batch)

    def __str__(self) -> str:
        return self.name


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return here({"input_ids": ids, "labels": ids.clone(), "attention_mask": mask})


def _unmasked() -> dict[str, Tensor]:
    return {name: value for name, value in _tokens().items() if name != "attention_mask"}


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT: dict[str, Any] = {"vocab_size": 64, **SIZES}
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
OF_TWO: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0}
BART: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
# the class, its config, what the config is given, the names of its rates of dropout, and a batch
TABLE: dict[str, tuple[str, str, dict[str, Any], str, Callable[[], Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, "attention_dropout", _tokens),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "head_dim": 8, "sliding_window": 8, "attn_implementation": "eager"},
        "attention_dropout",
        _tokens,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, "hidden_dropout attention_dropout", _tokens),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT, "resid_pdrop embd_pdrop attention_dropout", _tokens),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
        "attention_dropout",
        _tokens,
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        "",
        _unmasked,
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**OF_TWO, **BART},
        "dropout attention_dropout activation_dropout encoder_layerdrop decoder_layerdrop",
        _tokens,
    ),
}


def _maker(model: str, config: str, sizes: dict[str, Any], rates: str) -> Callable[[float], nn.Module]:
    def make(dropout: float) -> nn.Module:
        settings = getattr(transformers, config)(**sizes, **dict.fromkeys(rates.split(), dropout))
        return getattr(transformers, model)(settings)

    return make


ARCHITECTURES = {name: Architecture(name, _maker(*entry[:4]), entry[4]) for name, entry in TABLE.items()}
