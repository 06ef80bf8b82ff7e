"""Every policy on transformers of other build than the zoo's, in every precision, with and without dropout."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autockpt.runtime import attach, without_kv_cache
from autockpt.schema.choices import parse_choice
from tests.device import DEVICE, here, random_state_kept
from tests.policies.zoo import KINDS, Case, assert_equal, in_turn, language_step, train

pytestmark = pytest.mark.slow

SETTINGS = [(precision, dropout) for dropout in (0.0, 0.2) for precision in ("fp32", "weights in bf16", "bf16")]
STEPS = 5  # calls that go by what earlier ones taught are among them


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


def case_of(name: str, precision: str, dropout: float) -> Case:
    """Dropout is a rate that the config takes where it knows any."""
    model, config, sizes, rates, batch = TABLE[name]

    def make() -> nn.Module:
        settings = getattr(transformers, config)(**sizes, **dict.fromkeys(rates.split(), dropout))
        with random_state_kept():
            torch.manual_seed(0)
            made = getattr(transformers, model)(settings).train().to(DEVICE)
        return made.bfloat16() if precision == "weights in bf16" else made

    return Case(name, make, batch, language_step)


@in_turn(TABLE, 3)
def test_bit_equal_everywhere(kind: str, case: str) -> None:
    """Kinds, architectures and settings each with several of the others."""
    precision, dropout = SETTINGS[(KINDS.index(kind) + list(TABLE).index(case)) % len(SETTINGS)]
    made = case_of(case, precision, dropout)
    plain, model = made.make(), made.make()
    with without_kv_cache(plain):
        wanted = train(plain, made, precision, STEPS)
    choices = made.choices(model, parse_choice(kind))
    assert len(choices) >= 2
    with attach(model, choices) as session, without_kv_cache(model) if session.guard is None else nullcontext():
        assert_equal(train(model, made, precision, STEPS), wanted)
