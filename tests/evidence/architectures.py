"""The architectures and training settings of the table: small configs of transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TEXT: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 256}
_LLAMA = {**_TEXT, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
_GROUPED = {**_LLAMA, "num_key_value_heads": 2}
_BERT = {**_TEXT, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_IMAGE = {"image_size": 64, "patch_size": 8, "num_labels": 10}
_T5 = {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4}
_BART = {
    "vocab_size": 512,
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 256,
}
_SOUND = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}

# name -> class that is trained, settings of its config
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 32}),
    "qwen2": ("Qwen2ForCausalLM", {**_GROUPED, **_TOKENS}),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, **_TOKENS, "head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 32, "sliding_window": 32}),
    "gemma3_text": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 32, "sliding_window": 32}),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, **_TOKENS}),
    "olmo2": ("Olmo2ForCausalLM", {**_GROUPED, **_TOKENS}),
    "granite": ("GraniteForCausalLM", _GROUPED),
    "cohere": ("CohereForCausalLM", {**_GROUPED, **_TOKENS}),
    "stablelm": ("StableLmForCausalLM", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_BERT, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "gptj": ("GPTJForCausalLM", {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 4, "rotary_dim": 16}),
    "opt": (
        "OPTForCausalLM",
        {
            **_TEXT,
            "hidden_size": 128,
            "ffn_dim": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 128,
        },
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 512, "hidden_size": 128, "n_layer": 4, "n_head": 4}),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_GROUPED,
            **_TOKENS,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
        },
    ),
    "mamba": ("MambaForCausalLM", {"vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 3, "state_size": 8}),
    "bert": ("BertForMaskedLM", _BERT),
    "roberta": ("RobertaForMaskedLM", {**_BERT, "max_position_embeddings": 260}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "electra": ("ElectraForMaskedLM", {**_BERT, "embedding_size": 64}),
    "albert": ("AlbertForMaskedLM", {**_BERT, "embedding_size": 64, "num_hidden_groups": 2}),
    "modernbert": ("ModernBertForMaskedLM", {**_BERT, **_TOKENS, "cls_token_id": 1, "sep_token_id": 2}),
    "t5": ("T5ForConditionalGeneration", {**_T5, "dropout_rate": 0.1, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", _BART),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_BART,
            **_TOKENS,
            "num_mel_bins": 16,
            "max_source_positions": 96,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
        },
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", _SOUND),
    "vit": (
        "ViTForImageClassification",
        {**_IMAGE, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        {**_IMAGE, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 10,
        },
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"image_size": 64, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1], "num_labels": 10},
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 32, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1], "num_labels": 10},
    ),
}


@dataclass(frozen=True)
class Setting:
    """A way to train: what it is called, and what of the workload's spec it sets."""

    name: str
    spec: dict[str, Any]


PLAIN = Setting("AdamW", {})
OTHERS = (
    Setting("no optimizer step", {"optimizer": "none"}),
    Setting("accumulate 2, SGD", {"accumulate": 2, "optimizer": "sgd"}),
    Setting("LoRA 4", {"lora": 4}),
    Setting("autocast bf16", {"autocast": "bf16"}),
    Setting("bf16 weights, clipping", {"dtype": "bf16", "max_grad_norm": 1.0}),
    Setting("accumulate 2, autocast bf16", {"accumulate": 2, "autocast": "bf16"}),
)


def settings_of(number: int) -> tuple[Setting, Setting]:
    """Plain AdamW, and one of the others in turn."""
    return PLAIN, OTHERS[number % len(OTHERS)]
