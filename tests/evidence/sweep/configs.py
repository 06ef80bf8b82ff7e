"""Every architecture of transformers' auto mappings, and small configs for it: rules by the names of settings, and a
table for those where they do not do."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.evidence.sweep.overrides import OVERRIDES

# In this order: a config that several tasks know is tried in the first of them. Images before text alone, and what an
# encoder was made for before its use as a decoder.
TASKS = (
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
)


@dataclass(frozen=True)
class Architecture:
    """A type of config (``llama``), the class that is trained for it, and the auto mapping that names the class."""

    name: str
    cls: str
    task: str


def architectures() -> list[Architecture]:
    """All of them, task by task; nothing is imported for it but the mappings."""
    found: dict[str, Architecture] = {}
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        for name, cls in names.items():
            found.setdefault(name, Architecture(name, cls if isinstance(cls, str) else cls[0], task))
    return list(found.values())


VOCABULARY = 128
HIDDEN = 32

# The first pattern that matches a setting's whole name decides. None: the setting stays as it is.
_RULES: tuple[tuple[str, int | None], ...] = (
    (r"type_vocab_size|num_nextn_predict_layers|num_codebooks|pretraining_tp|.*_token_types?", None),
    (r"index_.*|.*topk_method", None),
    (r".*vocab_size.*|.*num_embeddings", VOCABULARY),
    (r"num_kv_shared_layers", 0),
    (r"(.*_)?(num_)?(key_value_heads|kv_heads|n_head_kv|multi_query_group_num)|num_attention_groups", 2),
    (r"(mamba|ssm|linear)_.*heads|.*(attention_heads|num_heads|n_heads?|_heads|heads)", 4),
    (r"first_k_dense_replace|num_dense_layers|first_dense_layers|.*shared_experts?|n_group|topk_group", 1),
    (r".*(experts_per_tok|experts_per_token|moe_topk|moe_top_k|top_k|moe_k|topk)", 2),
    (r"(.*_)?(num|n)_(local_|routed_)?experts|.*_(num|n)_experts|num_experts_total", 4),
    (r".*(interval|period|pattern)", 2),
    (r".*_offset", 1),
    (r".*(num_layers|hidden_layers|n_layers?|_layers|depth|num_blocks|encoder_blocks)|layers", 2),
    (r".*(head_dim|d_kv|kv_channels|head_size|_head_dim|d_head|dim_head)", 8),
    (r"rotary_dim", 4),
    (r".*(q|kv|o)_lora_rank", 16),
    (r".*(intermediate|ffn|d_ff|ff_dim|feedforward|feed_forward|mlp_dim|d_inner|n_inner|mlp_hidden|inner_dim).*", 64),
    (r".*(state_size|d_state|ssm_state|state_dim)", 8),
    (r".*chunk_size|.*chunk_length", 16),
    (r".*(sliding_window|local_attention|window_size|attention_window|attention_context).*", 8),
    (r".*(position_embeddings|n_positions|n_ctx|max_seq_len|_positions|seq_length|max_sequence_length|seq_len)", 64),
    (r".*num_mel_bins|num_spectrogram_bins|feature_size|input_feat_per_channel", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups|.*conv_groups", 4),
    (r"(.*_)?(image_size|input_size|img_size)", 32),
    (r"(.*_)?patch_size", 8),
    (r"(.*_)?(num_queries|num_latents|num_query_tokens|mm_tokens_per_image|num_image_tokens)", 16),
    (
        r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|proj_dim|emb_dim|d_embed"
        r"|hidden_channels|d_latents|embedding_dim|embed_size|proj_size|lru_width|hidden|dim|width|hidden_size_.*)",
        HIDDEN,
    ),
)
_LISTS: tuple[tuple[str, str], ...] = (
    (r".*(depths|layers|blocks|block_sizes|num_stages|layers_per_stage|repeats)", "counts"),
    (r".*heads.*", "heads"),
    (r".*(image_size|img_size|input_size)", "image"),
    (r".*patch_size", "patch"),
    (
        r".*(hidden_sizes|embed_dims?|dims?|widths|channels|encoder_channels|out_features_dim|conv_dim|d_model)",
        "widths",
    ),
)
_NO_DROPOUT = re.compile(r"layerdrop|layer_drop|drop_path|stochastic|label_dropout")
_KV = r"(key_value_heads|kv_heads)"
_KV_HEADS = rf"(.*_)?(num_)?{_KV}"
_MOST_KINDS = 4
_TOKEN = re.compile(r".*(token_id|token_index|token_ids|_id|_idx)$")


def small_config(name: str) -> PreTrainedConfig:
    """A config of the type ``name`` with small sizes, parts included. Raises whatever the config's class raises."""
    config = _small(CONFIG_MAPPING[name], name, "")
    if config.is_encoder_decoder:
        for part in (config, getattr(config, "decoder", None)):
            for token in ("pad_token_id", "decoder_start_token_id"):
                if part is not None and getattr(part, token, None) is None:
                    setattr(part, token, 0)
    return config


def _small(cls: type[PreTrainedConfig], name: str, path: str) -> PreTrainedConfig:
    default = cls()
    settings: dict[str, Any] = {}
    tokens = iter(range(VOCABULARY - 1, 0, -1))
    parameters = _parameters(cls)
    for field, given in parameters.items():
        value = _value(default, field)
        if isinstance(value, PreTrainedConfig):
            settings[field] = _small(type(value), name, f"{path}{field}.")
        elif isinstance(value, int) and not isinstance(value, bool) and _TOKEN.fullmatch(field):
            settings[field] = value if value < 8 else next(tokens)
        elif given is None and isinstance(value, (list, tuple)):
            continue  # derived from the others
        elif re.fullmatch(_KV_HEADS, field) and value == _value(default, re.sub(_KV, "attention_heads", field)):
            settings[field] = 4
        elif (small := _shrunk(field, value)) is not None:
            settings[field] = small
    settings |= _layer_types(default, parameters)
    for key, value in OVERRIDES.get(name, {}).items():
        head, _, last = key.rpartition(".")
        if (f"{head}." if head else "") == path:
            settings[last] = value
    return cls(**{key: value for key, value in settings.items() if value is not ...})


def _parameters(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """A config's settings with the defaults that its class gives them."""
    signature = inspect.signature(cls.__init__).parameters
    return {name: p.default for name, p in signature.items() if name not in ("self", "kwargs", "args")}


def _value(config: PreTrainedConfig, field: str) -> Any:
    try:
        return getattr(config, field, None)
    except Exception:  # settings that differ from layer to layer
        return None


def _layer_types(default: PreTrainedConfig, parameters: dict[str, Any]) -> dict[str, Any]:
    """Every kind of layer once, and no fewer than two layers."""
    layers = _value(default, "num_hidden_layers")
    lists: dict[str, list[str]] = {}
    for field in parameters:
        value = _value(default, field)
        if field.endswith("layer_types") and isinstance(value, (list, tuple)) and len(value) == layers:
            lists[field] = list(dict.fromkeys(value))[:_MOST_KINDS]
    if not lists:
        return {}
    count = max(2, *map(len, lists.values()))
    return {field: [kinds[i % len(kinds)] for i in range(count)] for field, kinds in lists.items()} | {
        "num_hidden_layers": count
    }


def _shrunk(name: str, value: Any) -> Any:
    """The small value of a setting; None where it stays."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)) and "drop" in name and not _NO_DROPOUT.search(name):
        return 0.1
    if isinstance(value, int):
        return _small_number(name, value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return _small_list(name, value)
    return None


def _small_number(name: str, value: int) -> int | None:
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return None if small is None or value < small else small
    return None


def _small_list(name: str, values: list[int] | tuple[int, ...]) -> list[int] | tuple[int, ...] | None:
    kind = next((kind for pattern, kind in _LISTS if re.fullmatch(pattern, name)), None)
    count = len(values)
    made = {
        "counts": [min(v, 2) for v in values],
        "heads": [min(v, 2) for v in values],
        "image": [32] * count,
        "patch": [min(v, 8) for v in values],
        "widths": [min(v, HIDDEN) for v in values]
        if len(set(values)) == 1
        else [16 * min(i + 1, 4) for i in range(count)],
    }.get(kind or "")
    return made if made is None else type(values)(made)
