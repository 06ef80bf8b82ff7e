"""Settings that the rules for small configs do not get right, by type of config; parts by their path."""

from __future__ import annotations

from typing import Any

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

# ``...`` leaves a setting out, so that the class's own default stands.
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config.rope_parameters": MROPE},
    "swin": {"image_size": 32, "patch_size": 2, "window_size": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
}
