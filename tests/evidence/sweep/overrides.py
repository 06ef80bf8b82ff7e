"""Settings that the rules for small configs do not get right, by type of config; parts by their path."""

from typing import Any

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IMAGE_MROPE = {"text_config.rope_parameters": MROPE}

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2}

# ``...`` leaves a setting out, so that the class's own default stands.
_SEVERAL: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("qwen2_vl", "paddleocr_vl", "glm4v", "glm46v", "glm_ocr", "glmga", "glm4v_moe", "cosmos3_edge"), IMAGE_MROPE),
    (("ernie4_5_vl_moe", "qwen2_5_omni_thinker"), IMAGE_MROPE),
    (("swin", "donut-swin", "maskformer-swin"), {"image_size": 32, "patch_size": 2, "window_size": 2}),
    (("bamba", "granitemoehybrid"), MAMBA),
    (("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 8}),
    (("wav2vec2-bert", "wav2vec2-conformer"), {"vocab_size": 128}),
    (("exaone4_5", "hyperclovax_vision_v2"), {"vision_config.window_size": 32}),
    (("pvt", "glpn", "segformer"), {"num_encoder_blocks": 4}),
    (("zamba", "zamba2"), {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4}),
)
OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: settings for names, settings in _SEVERAL for name in names},
    "bit": {"hidden_sizes": [128, 128, 128, 128], "num_groups": 8},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config.num_attention_heads": 4, "text_config.num_key_value_heads": 4},
    "dots3_note_text": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_vl": {"text_config.head_dim": 8, "text_config.rope_parameters": MROPE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"vision_config.intermediate_size": 128},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mpt": {"attn_config.attn_pdrop": 0},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "qwen2_5_vl": {**IMAGE_MROPE, "vision_config.window_size": 32},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "attn_layers": ["local", "lsh"]},
    "step3p7": {"text_config.sliding_window": 8},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xmod": {"default_language": "en_XX"},
}
