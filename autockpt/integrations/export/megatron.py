"""Megatron-LM: flags, as of August 2026 (``core/transformer/transformer_config.py``, ``core/recompute.py``)."""

from __future__ import annotations

from autockpt.integrations.export.wanted import Exported, LayerChoices, document

# a word in the name of a layer's part, and what Megatron calls that module
_MODULES = (("norm", "layernorm"), ("attn", "core_attn"), ("attention", "core_attn"), ("mlp", "mlp"), ("moe", "moe"))
_BY_ORDER = "Megatron has model definitions of its own: layers are matched by their order"
_PER_STAGE = "the number is per pipeline stage: divide it by the number of stages"


def export_megatron(wanted: LayerChoices) -> Exported:
    """Full recompute of the first n layers, of all layers, or of named modules in all layers; or offloading.

    ``--recompute-method block`` counts layers from the first; ``selective`` always means all layers;
    ``--cpu-offloading-num-layers n`` moves what the first n layers save, n less than all, and excludes recompute.
    """
    names, count = list(wanted.layers), len(wanted.to_free)
    if not count:
        return document("megatron", ["# no flag is needed"], wanted, wanted.lost([]), [_BY_ORDER])
    if modules := _modules(wanted):
        flags = ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
        return document("megatron", flags, wanted, _lost_modules(wanted, modules), [_BY_ORDER])
    first = names[:count]
    if wanted.all_are("offload") and count < len(names):
        flags = ["--cpu-offloading", f"--cpu-offloading-num-layers {count}"]
        notes = [_BY_ORDER, "offloading needs Transformer Engine and takes no pipeline stages and no recompute"]
        return document("megatron", flags, wanted, wanted.lost(first, {"offload": None}, "moved off the device"), notes)
    if first == names:
        method, notes = ["--recompute-method uniform", "--recompute-num-layers 1"], [_BY_ORDER]
    else:
        method = ["--recompute-method block", f"--recompute-num-layers {count}"]
        notes = [_BY_ORDER, _PER_STAGE]
    return document("megatron", ["--recompute-granularity full", *method], wanted, wanted.lost(first), notes)


def _modules(wanted: LayerChoices) -> list[str]:
    """Megatron's modules, where every choice is `recompute` on a part that it has a name for; empty otherwise."""
    if (
        wanted.others
        or set(wanted.parts.values()) != {"recompute"}
        or not all(_parts_of(wanted, layer) for layer in wanted.freed)
    ):
        return []
    found = {_module(part) for part in wanted.parts}
    return [] if None in found else sorted(m for m in found if m is not None)


def _module(part: str) -> str | None:
    last = part.rpartition(".")[2].lower()
    return next((module for word, module in _MODULES if word in last), None)


def _parts_of(wanted: LayerChoices, layer: str) -> list[str]:
    return [part for part in wanted.parts if part.startswith(f"{layer}.")]


def _lost_modules(wanted: LayerChoices, modules: list[str]) -> list[str]:
    losses = []
    for module in modules:
        without = [n for n in wanted.layers if module not in map(_module, _parts_of(wanted, n))]
        if without:
            losses.append(
                f"{module} is recomputed in all layers, in {len(without)} of which the plan keeps it (slower)"
            )
    if "core_attn" in modules:
        losses.append("core_attn is the attention itself, without the projections around it (more memory)")
    return losses + wanted.lost_others()
