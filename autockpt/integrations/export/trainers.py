"""The settings of each trainer, as near to a plan as they come. A new one is a function and a line in ``TARGETS``.

transformers and TRL: as far as the installed version has them. axolotl: keys of its YAML, as of July 2026
(``utils/schemas/config.py``, ``docs/gradient_checkpointing.qmd``). torchtitan: ``[activation_checkpoint]`` of its TOML
(up to 0.2), and the field of its Python configs since. Megatron-LM: flags, as of August 2026
(``core/transformer/transformer_config.py``, ``core/recompute.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

from autockpt.errors import UsageError
from autockpt.integrations.export.wanted import AS_RECOMPUTE, Exported, LayerChoices, document, nearest_stride, read
from autockpt.schema.plan import Plan
from autockpt.schema.suggest import did_you_mean

_FROM_THE_HOST = {
    **AS_RECOMPUTE,
    "recompute_offload": None,
    "offload": "recomputed from an input that is off the device, instead of moved itself",
}
_BY_ORDER = " has model definitions of its own: layers are matched by their order"
# a word in the name of a layer's part, and what Megatron calls that module
_MODULES = (("norm", "layernorm"), ("attn", "core_attn"), ("attention", "core_attn"), ("mlp", "mlp"), ("moe", "moe"))


def export(plan: Plan, target: str) -> Exported:
    """The plan as settings of ``target``, one of ``TARGETS``.

    No setting keeps more of a layer than the plan where the target can do without; what differs is said in words.
    Raises UsageError for an unknown target, PlanError for a plan that names no layers.
    """
    if target not in TARGETS:
        raise UsageError(
            f"{target!r} is no trainer that a plan can be exported to",
            remedy=f"{did_you_mean(target, TARGETS)}Known: {', '.join(TARGETS)}.",
        )
    return TARGETS[target](read(plan))


def transformers(wanted: LayerChoices, target: str = "transformers") -> Exported:
    """``activation_checkpointing``, with ``every_n_layers`` and ``offload`` where these exist: YAML of arguments.

    ``every_n_layers: n`` recomputes layers 0, n, 2n, …; ``offload`` holds their inputs in host memory.
    """
    name, options = _supported()
    if not wanted.to_free:
        return document(target, [f"{name}: false"], wanted, [])
    stride, picked = 1, list(wanted.layers)
    if "every_n_layers" in options:
        stride, picked = nearest_stride(wanted, lambda names, n: names[::n])
    chosen = [f"  every_n_layers: {stride}"] if stride > 1 else []
    missing = [option for option in ("every_n_layers", "offload") if option not in options]
    notes = [f"the installed transformers has no {' and no '.join(missing)}; a newer one comes nearer"] * bool(missing)
    kind, losses = "recompute", AS_RECOMPUTE
    if "offload" in options and wanted.all_are("offload", "recompute_offload"):
        chosen.append("  offload: true")
        kind, losses = "recompute_offload", _FROM_THE_HOST
        notes.append("transformers copies on the compute stream; a plan's copies run concurrently with it (slower)")
    lines = [f"{name}: true", *([f"{name}_kwargs:", *chosen] if chosen else [])]
    return document(target, lines, wanted, picked, kind, losses, notes)


def trl(wanted: LayerChoices) -> Exported:
    """The same, and ``activation_offloading`` where the plan offloads: it moves what all layers save, inputs too."""
    name, _ = _supported()
    if not {"offload", "recompute_offload"} & set(wanted.layers.values()):
        return transformers(wanted, "trl")
    notes, picked = ["TRL moves what other modules save, too, as the output head"], list(wanted.layers)
    if wanted.all_are("offload"):
        lines = [f"{name}: false", "activation_offloading: true"]
        return document("trl", lines, wanted, picked, "offload", {"offload": None}, notes)
    lines = [f"{name}: true", "activation_offloading: true"]
    losses = {**_FROM_THE_HOST, "recompute": "its input is moved off the device, too (slower)"}
    return document("trl", lines, wanted, picked, "recompute_offload", losses, notes)


def axolotl(wanted: LayerChoices) -> Exported:
    """``gradient_checkpointing`` for all layers or none, with ``activation_offloading`` or ``selective_checkpointing``.

    ``activation_offloading: true`` moves what all layers save instead of recomputing them; ``hidden_states`` recomputes
    all layers from inputs in host memory; ``selective_checkpointing: true`` keeps the output of attention.
    """
    if not wanted.to_free:
        return document("axolotl", ["gradient_checkpointing: false"], wanted, [])
    more, kind, losses, notes = list[str](), "recompute", AS_RECOMPUTE, list[str]()
    if wanted.all_are("offload"):
        more, kind, losses = ["activation_offloading: true"], "offload", {"offload": None}
        notes = ["axolotl asks for gradient_checkpointing with offloading, and then moves instead of recomputing"]
    elif wanted.all_are("recompute_offload", "offload"):
        more, kind, losses = ["activation_offloading: hidden_states"], "recompute_offload", _FROM_THE_HOST
    elif wanted.all_are("keep_attention"):
        more, kind, losses = ["selective_checkpointing: true"], "keep_attention", {"keep_attention": None}
        notes = ["sliding-window attention is run again unless selective_checkpointing.save_sliding_window is set"]
    lines = ["gradient_checkpointing: true", *more]
    return document("axolotl", lines, wanted, list(wanted.layers), kind, losses, notes)


def torchtitan(wanted: LayerChoices) -> Exported:
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
    return document("torchtitan", lines, wanted, picked, notes=["torchtitan" + _BY_ORDER])


def megatron(wanted: LayerChoices) -> Exported:
    """Full recompute of the first n layers, of all layers, or of named modules in all layers; or offloading.

    ``--recompute-method block`` counts layers from the first; ``selective`` always means all layers;
    ``--cpu-offloading-num-layers n`` moves what the first n layers save, n less than all, and excludes recompute.
    """
    names, count, notes = list(wanted.layers), len(wanted.to_free), ["Megatron" + _BY_ORDER]
    if not count:
        return document("megatron", ["# no flag is needed"], wanted, [], notes=notes)
    if modules := _modules(wanted):
        flags = ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
        return document("megatron", flags, wanted, None, notes=notes, lost=_lost_modules(wanted, modules))
    first = names[:count]
    if wanted.all_are("offload") and count < len(names):
        flags = ["--cpu-offloading", f"--cpu-offloading-num-layers {count}"]
        notes.append("offloading needs Transformer Engine and takes no pipeline stages and no recompute")
        return document("megatron", flags, wanted, first, "offload", {"offload": None}, notes)
    method = ["--recompute-method uniform", "--recompute-num-layers 1"]
    if first != names:
        method = ["--recompute-method block", f"--recompute-num-layers {count}"]
        notes.append("the number is per pipeline stage: divide it by the number of stages")
    return document("megatron", ["--recompute-granularity full", *method], wanted, first, notes=notes)


TARGETS: dict[str, Callable[[LayerChoices], Exported]] = {
    "transformers": transformers,
    "trl": trl,
    "axolotl": axolotl,
    "torchtitan": torchtitan,
    "megatron": megatron,
}


def _supported() -> tuple[str, frozenset[str]]:
    """The installed transformers' name of the flag, and the options that it has beyond torch's own."""
    from autockpt.workload.configs import quiet

    with quiet():
        from transformers import PreTrainedModel, TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}  # type: ignore[arg-type]
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in known)
    enable = getattr(PreTrainedModel, f"{name}_enable")
    return name, frozenset(inspect.signature(enable).parameters) & {"every_n_layers", "offload"}


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
