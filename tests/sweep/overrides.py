"""Settings that the rules for small configs do not get right, by type of config; parts by their path."""

from __future__ import annotations

from typing import Any

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
IMAGE_MROPE = {"text_config.rope_parameters": MROPE}

# ``...`` leaves a setting out, so that the class's own default stands.
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm4v", "glm46v", "glm_ocr", "glmga", "glm4v_moe", "cosmos3_edge"),
        IMAGE_MROPE,
    ),
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "hunyuan_vl": {"text_config.head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": MROPE},
    "step3p7": {"text_config.sliding_window": 8},
    "swin": {"image_size": 32, "patch_size": 2, "window_size": 2},
}
