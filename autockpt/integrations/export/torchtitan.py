"""torchtitan: ``[activation_checkpoint]`` of its TOML (up to 0.2), and the field of its Python configs since."""

from __future__ import annotations

from autockpt.integrations.export.wanted import Exported, LayerChoices, document, nearest_stride


def export_torchtitan(wanted: LayerChoices) -> Exported:
    """``mode`` none or full, or selective for every n-th layer: ``selective_ac_option = "n"`` recomputes layers n-1,
    2n-1, … Python configs (2026) know all layers or none: ``FullAC.Config()``, ``None``.
    """
    picked: list[str] = []
    mode, python = ['mode = "none"'], "None"
    if wanted.to_free:
        stride, picked = nearest_stride(wanted, lambda names, n: names[n - 1 :: n])
        mode = ['mode = "full"'] if stride == 1 else ['mode = "selective"', f'selective_ac_option = "{stride}"']
        python = "FullAC.Config()" + ("  (all layers: these have no stride)" if stride > 1 else "")
    lines = ["[activation_checkpoint]", *mode, f"# torchtitan with Python configs: activation_checkpoint={python}"]
    notes = ["torchtitan has model definitions of its own: layers are matched by their order"]
    return document("torchtitan", lines, wanted, wanted.lost(picked), notes)
