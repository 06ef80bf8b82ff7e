"""axolotl: keys of its YAML, as of July 2026 (``utils/schemas/config.py``, ``docs/gradient_checkpointing.qmd``)."""

from __future__ import annotations

from autockpt.integrations.export.wanted import AS_RECOMPUTE, Exported, LayerChoices, document


def export_axolotl(wanted: LayerChoices) -> Exported:
    """``gradient_checkpointing`` for all layers or none, with ``activation_offloading`` or ``selective_checkpointing``.

    ``activation_offloading: true`` moves what all layers save instead of recomputing them; ``hidden_states`` recomputes
    all layers from inputs in host memory; ``selective_checkpointing: true`` keeps the output of attention.
    """
    picked = list(wanted.layers)
    lines = ["gradient_checkpointing: true"]
    if not wanted.to_free:
        return document("axolotl", ["gradient_checkpointing: false"], wanted, wanted.lost([]))
    if wanted.all_are("offload"):
        lost = wanted.lost(picked, {"offload": None}, "moved off the device")
        note = "axolotl asks for gradient_checkpointing with offloading, and then moves instead of recomputing"
        return document("axolotl", [*lines, "activation_offloading: true"], wanted, lost, [note])
    if wanted.all_are("recompute_offload", "offload"):
        losses = {"recompute_offload": None, "offload": "recomputed from an input off the device, not moved itself"}
        lost = wanted.lost(picked, losses)
        return document("axolotl", [*lines, "activation_offloading: hidden_states"], wanted, lost)
    if wanted.all_are("keep_attention"):
        lost = wanted.lost(picked, {"keep_attention": None})
        note = "sliding-window attention is run again unless selective_checkpointing.save_sliding_window is set"
        return document("axolotl", [*lines, "selective_checkpointing: true"], wanted, lost, [note])
    return document("axolotl", lines, wanted, wanted.lost(picked, AS_RECOMPUTE))
