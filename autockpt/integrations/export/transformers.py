"""transformers: ``TrainingArguments`` as far as the installed version has them."""

from __future__ import annotations

import inspect
from dataclasses import fields

from autockpt.integrations.export.wanted import AS_RECOMPUTE, Exported, LayerChoices, Losses, document, nearest_stride

_OFFLOADED: Losses = {
    **AS_RECOMPUTE,
    "recompute_offload": None,
    "offload": "recomputed from an input that is off the device, instead of moved itself",
}


def export_transformers(wanted: LayerChoices) -> Exported:
    """``activation_checkpointing``, with ``every_n_layers`` and ``offload`` where these exist: YAML of arguments.

    ``every_n_layers: n`` recomputes layers 0, n, 2n, …; ``offload`` holds their inputs in host memory.
    """
    name, options = _supported()
    if not wanted.to_free:
        return document("transformers", [f"{name}: false"], wanted, wanted.lost([]))
    stride, picked = 1, list(wanted.layers)
    if "every_n_layers" in options:
        stride, picked = nearest_stride(wanted, lambda names, n: names[::n])
    chosen = [f"  every_n_layers: {stride}"] if stride > 1 else []
    missing = [option for option in ("every_n_layers", "offload") if option not in options]
    notes = [f"the installed transformers has no {' and no '.join(missing)}; a newer one comes nearer"] * bool(missing)
    losses = AS_RECOMPUTE
    if "offload" in options and wanted.all_are("offload", "recompute_offload"):
        chosen.append("  offload: true")
        losses = _OFFLOADED
        notes.append("transformers copies on the compute stream; a plan's copies run concurrently with it (slower)")
    lines = [f"{name}: true", *([f"{name}_kwargs:", *chosen] if chosen else [])]
    return document("transformers", lines, wanted, wanted.lost(picked, losses), notes)


def _supported() -> tuple[str, frozenset[str]]:
    """The installed version's name of the flag, and the options that it has beyond torch's own."""
    from autockpt.workload.configs import quiet

    with quiet():
        from transformers import PreTrainedModel, TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}  # type: ignore[arg-type]
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in known)
    enable = getattr(PreTrainedModel, f"{name}_enable")
    return name, frozenset(inspect.signature(enable).parameters) & {"every_n_layers", "offload"}
