"""Small transformers of different build: one config each, with and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.device import DEVICE, here, random_state_kept
from tests.policies.zoo import Cnn, feature_step, language_step

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Architecture:
    """``make(dropout)`` builds the model; dropout is a rate that the config takes where it knows any."""

    name: str
    make: Callable[[float], nn.Module]
    batch: Callable[[], Any]
    takes_cache: bool = False

    def build(self, dropout: float) -> nn.Module:
        with random_state_kept():
            torch.manual_seed(0)
            return self.make(dropout).train().to(DEVICE)

    def step(self, model: nn.Module, batch: Any, **extra: Any) -> Tensor:
        if isinstance(batch, Tensor):
            return feature_step(model, batch)
        return language_step(model, batch, **extra)

    def __str__(self) -> str:
        return self.name


def _model(cls: str, config: str, **settings: Any) -> nn.Module:
    made = getattr(transformers, config)(**settings)
    return getattr(transformers, cls)(made)


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return here({"input_ids": ids, "labels": ids.clone(), "attention_mask": mask})


def _unmasked() -> dict[str, Tensor]:
    return {name: value for name, value in _tokens().items() if name != "attention_mask"}


def _pixels() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return here({"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": torch.arange(4) % 3})


def _images() -> Tensor:
    return here(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3)))


def _cnn(dropout: float) -> nn.Module:
    model = Cnn()
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = dropout
    return model


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture(
            "llama",
            lambda p: _model(
                "LlamaForCausalLM",
                "LlamaConfig",
                **TEXT,
                intermediate_size=64,
                num_key_value_heads=2,
                attention_dropout=p,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "qwen3",
            lambda p: _model(
                "Qwen3ForCausalLM",
                "Qwen3Config",
                **TEXT,
                intermediate_size=64,
                num_key_value_heads=2,
                head_dim=8,
                attention_dropout=p,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "gemma2",
            lambda p: _model(
                "Gemma2ForCausalLM",
                "Gemma2Config",
                **TEXT,
                intermediate_size=64,
                num_key_value_heads=2,
                head_dim=8,
                sliding_window=8,
                attention_dropout=p,
                attn_implementation="eager",
            ),
            _tokens,
            True,
        ),
        Architecture(
            "gpt2",
            lambda p: _model(
                "GPT2LMHeadModel",
                "GPT2Config",
                vocab_size=64,
                n_positions=32,
                n_embd=32,
                n_layer=2,
                n_head=4,
                attn_pdrop=p,
                resid_pdrop=p,
                embd_pdrop=p,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "gpt_neox",
            lambda p: _model(
                "GPTNeoXForCausalLM",
                "GPTNeoXConfig",
                **TEXT,
                intermediate_size=64,
                use_parallel_residual=True,
                hidden_dropout=p,
                attention_dropout=p,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "phi",
            lambda p: _model(
                "PhiForCausalLM",
                "PhiConfig",
                **TEXT,
                intermediate_size=64,
                resid_pdrop=p,
                embd_pdrop=p,
                attention_dropout=p,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "mixtral",
            lambda p: _model(
                "MixtralForCausalLM",
                "MixtralConfig",
                **TEXT,
                intermediate_size=64,
                num_key_value_heads=2,
                num_local_experts=4,
                attention_dropout=p,
                output_router_logits=True,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "mamba",
            lambda p: _model(
                "MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2
            ),
            _unmasked,
            True,
        ),
        Architecture(
            "bert",
            lambda p: _model(
                "BertForMaskedLM",
                "BertConfig",
                **TEXT,
                intermediate_size=64,
                hidden_dropout_prob=p,
                attention_probs_dropout_prob=p,
            ),
            _tokens,
        ),
        Architecture(
            "t5",
            lambda p: _model(
                "T5ForConditionalGeneration",
                "T5Config",
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                dropout_rate=p,
                decoder_start_token_id=0,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "bart",
            lambda p: _model(
                "BartForConditionalGeneration",
                "BartConfig",
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_position_embeddings=32,
                dropout=p,
                attention_dropout=p,
                activation_dropout=p,
                encoder_layerdrop=p,
                decoder_layerdrop=p,
                pad_token_id=0,
                decoder_start_token_id=0,
            ),
            _tokens,
            True,
        ),
        Architecture(
            "vit",
            lambda p: _model(
                "ViTForImageClassification",
                "ViTConfig",
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=16,
                patch_size=4,
                hidden_dropout_prob=p,
                attention_probs_dropout_prob=p,
                num_labels=3,
            ),
            _pixels,
        ),
        Architecture("cnn", _cnn, _images),
    )
}
