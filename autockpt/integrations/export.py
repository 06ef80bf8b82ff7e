"""Export a plan: the nearest setting of a trainer that has activation checkpointing of its own, and what is lost.

A trainer is a function and a line in ``TRAINERS``. No setting keeps more of a layer than the plan where the trainer can
do without. Layers are matched by their order: some trainers have models of their own.

transformers and TRL: arguments of their trainers, as of September 2026. axolotl: keys of its YAML, as of July 2026
(``utils/schemas/config.py``, ``docs/gradient_checkpointing.qmd``). torchtitan: ``[activation_checkpoint]`` of its TOML
(up to 0.2), and the field of its Python configs since. Megatron-LM: flags, as of August 2026
(``core/transformer/transformer_config.py``, ``core/recompute.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autockpt.errors import PlanError, UsageError
from autockpt.schema import words
from autockpt.schema.base import Data, did_you_mean
from autockpt.schema.baselines import baseline_plans
from autockpt.schema.names import listing, outermost
from autockpt.schema.plan import Plan
from autockpt.schema.sizes import format_binary

_CHECKPOINTING = "gradient_checkpointing"  # the spelling that every version of transformers and axolotl has


class Exported(Data):
    """Settings for a trainer of its own kind, as the text of a file, and what of the plan is lost with them."""

    settings: str
    losses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerChoices:
    """A plan's choices, layer by layer.

    ``layers`` are what all layers do by name, in the model's order: the kind of a choice, and for a layer that saves
    but for a part of it that part's (``recompute (of mlp)``): freeing more than the plan keeps its budget, freeing less
    breaks it. ``others`` are kinds of choice on anything else (a head, a loss). ``adapters``: it is these that train.
    """

    layers: dict[str, str]
    others: dict[str, str]
    adapters: bool = False

    @property
    def to_free(self) -> list[str]:
        """The layers that a setting is to free at least: all, where the plan frees memory that is no layer's."""
        return [name for name, kind in self.layers.items() if self.others or kind != "save"]

    def all_are(self, *kinds: str) -> bool:
        """Whether layers are freed, by these kinds of choice only, each as a whole."""
        freed = {kind for kind in self.layers.values() if kind != "save"}
        return bool(freed) and freed <= set(kinds)


@dataclass(frozen=True)
class Setting:
    """Lines of a trainer's settings: they give the layers ``picked`` the choice ``kind``, and the others none."""

    lines: list[str]
    picked: list[str]
    kind: str = "recompute"
    notes: tuple[str, ...] = ()

    def done_to(self, layers: Iterable[str]) -> dict[str, str]:
        """The kind of choice that each layer gets."""
        return {name: self.kind if name in self.picked else "save" for name in layers}


def export(plan: Plan, trainer: str) -> Exported:
    """The plan as settings of ``trainer``, one of ``TRAINERS``; comments in front say what differs.

    Raises UsageError for an unknown trainer, PlanError for a plan that names no layers.
    """
    if trainer not in TRAINERS:
        raise UsageError(
            f"plans cannot be exported to {trainer!r}",
            remedy=f"{did_you_mean(trainer, TRAINERS)}Known: {', '.join(TRAINERS)}.",
        )
    wanted = read(plan)
    setting = TRAINERS[trainer](wanted)
    losses = list(losses_of(wanted, setting))
    notes = [*setting.notes, *_figures(plan, setting.done_to(wanted.layers))]
    if plan.smaller_batches:
        sets = f"{len(plan.smaller_batches)} more sets of choices, for smaller batches"
        losses.append(f"{sets}: these settings are for the largest")
    if gathered := [pattern for pattern, choice in plan.choices.items() if choice.gathered]:
        losses.append(f"{listing(gathered)}: weights are gathered again for backward, unless the trainer keeps all")
    head = [f"The nearest setting of {trainer} to an autockpt plan."]
    head += ["What is lost:", *(f"- {loss}" for loss in losses)] if losses else ["Nothing is lost."]
    head += [f"Note: {note}" for note in notes]
    text = "\n".join([*(f"# {line}" for line in head), *setting.lines]) + "\n"
    return Exported(settings=text, losses=tuple(losses), notes=tuple(notes))


def read(plan: Plan) -> LayerChoices:
    """A plan's choices layer by layer. Raises PlanError where it does not list the model's layers."""
    head = plan.head
    listed = [n for n in plan.model.classes if n != head]
    chosen = {n: c.kind for n, c in plan.expand(listed, head).items()} if listed else {}
    outer = outermost(chosen)
    layers = {n: chosen[n] for n in outer if n.rpartition(".")[2].isdigit()}
    if not layers:
        raise PlanError(
            "the plan lists no layers under `model:`, named as model.layers.0 is",
            remedy="Export a plan that autockpt search wrote.",
        )
    parts = {n: k for n, k in chosen.items() if n not in outer and k != "save"}
    for layer in layers:
        inside = {n.removeprefix(f"{layer}."): k for n, k in parts.items() if n.startswith(f"{layer}.")}
        if inside:
            layers[layer] = ", ".join(f"{kind} (of {', '.join(names)})" for kind, names in _grouped(inside))
    others = {n: chosen[n] for n in outer if n not in layers and chosen[n] != "save"}
    return LayerChoices(layers, others, plan.workload is not None and plan.workload.lora is not None)


def losses_of(wanted: LayerChoices, setting: Setting) -> Iterable[str]:
    """What a setting does otherwise than the plan, in words."""
    does = setting.done_to(wanted.layers)
    # where layers are alike, as many that free their memory need no more of it
    more = "" if len(setting.picked) >= len(wanted.to_free) else " (more memory)"
    for (kind, done), names in _grouped({name: (kind, does[name]) for name, kind in wanted.layers.items()}):
        if kind != done:
            yield f"{listing(names)}: `{done}` instead of `{kind}`{more if done == 'save' else ''}"
    for kind, names in _grouped(wanted.others):
        yield f"{listing(names)}: `{kind}` is left out; all layers are freed instead, which may not be enough"


def _grouped(choices: dict[str, Any]) -> Iterable[tuple[Any, list[str]]]:
    for kind in dict.fromkeys(choices.values()):
        yield kind, [name for name, k in choices.items() if k == kind]


def _figures(plan: Plan, does: dict[str, str]) -> Iterable[str]:
    """What a plan's search found about this very setting, where it is one of the usual plans compared there."""
    usual = baseline_plans(list(does), ("recompute", "offload", "recompute_offload"))
    for row in plan.baselines:
        reading = row.measured or row.predicted
        if reading is not None and {unit: c.kind for unit, c in usual.get(row.name, {}).items()} == does:
            how = "measured" if row.measured is not None else "predicted"
            text = f"the plan's search {how} this setting (`{row.name}`): {words.step_of(reading)} a step"
            over = plan.budget is not None and reading.peak_bytes > plan.budget.bytes
            yield f"{text}, peak {format_binary(reading.peak_bytes)}{', over the budget' * over}"


def nearest_stride(wanted: LayerChoices, first: Callable[[int], int]) -> tuple[int, list[str]]:
    """Every how many layers to free one, and which these are; ``first`` gives the first one's number for a stride.

    The stride that hits the very layers of the plan, else the largest that frees at least as many.
    """
    names = list(wanted.layers)
    strides = {n: names[first(n) :: n] for n in range(1, len(names) + 1)}
    exact = next((n for n, picked in strides.items() if picked == wanted.to_free), None)
    n = exact or max(n for n, picked in strides.items() if len(picked) >= len(wanted.to_free))
    return n, strides[n]


def transformers(wanted: LayerChoices) -> Setting:
    """``every_n_layers: n`` recomputes layers 0, n, 2n, …; ``offload`` holds their inputs in host memory."""
    if not wanted.to_free:
        return Setting([f"{_CHECKPOINTING}: false"], [])
    stride, picked = nearest_stride(wanted, lambda n: 0)
    options, kind, notes = [f"  every_n_layers: {stride}"] if stride > 1 else [], "recompute", ()
    if wanted.all_are("offload", "recompute_offload"):
        options, kind = [*options, "  offload: true"], "recompute_offload"
        notes = ("`offload` needs a transformers of September 2026 or later",)
    lines = [f"{_CHECKPOINTING}: true", *([f"{_CHECKPOINTING}_kwargs:", *options] if options else [])]
    return Setting(lines, picked, kind, notes)


def trl(wanted: LayerChoices) -> Setting:
    """The same, and ``activation_offloading`` where the plan offloads: it moves what all layers save, inputs too."""
    if not any("offload" in kind for kind in wanted.layers.values()):
        return transformers(wanted)
    moved = wanted.all_are("offload")
    lines = [f"{_CHECKPOINTING}: {'false' if moved else 'true'}", "activation_offloading: true"]
    notes = ("TRL also offloads what other modules save, such as the output head",)
    return Setting(lines, list(wanted.layers), "offload" if moved else "recompute_offload", notes)


def axolotl(wanted: LayerChoices) -> Setting:
    """``gradient_checkpointing`` for all layers or none, with ``activation_offloading`` or ``selective_checkpointing``.

    ``activation_offloading: true`` moves what all layers save; where no adapter trains, it wraps layers for recomputing
    first, so that these are their inputs (``loaders/model.py``). ``hidden_states`` recomputes all layers from inputs in
    host memory; ``selective_checkpointing: true`` keeps the output of attention.
    """
    if not wanted.to_free:
        return Setting([f"{_CHECKPOINTING}: false"], [])
    layers, on = list(wanted.layers), f"{_CHECKPOINTING}: true"
    if wanted.all_are("offload"):
        done = "offload" if wanted.adapters else "recompute_offload"
        return Setting([on, "activation_offloading: true"], layers, done)
    if wanted.all_are("recompute_offload", "offload"):
        return Setting([on, "activation_offloading: hidden_states"], layers, "recompute_offload")
    if wanted.all_are("keep_attention"):
        notes = ("sliding-window attention is run again unless selective_checkpointing.save_sliding_window is set",)
        return Setting([on, "selective_checkpointing: true"], layers, "keep_attention", notes)
    return Setting([on], layers)


def torchtitan(wanted: LayerChoices) -> Setting:
    """``mode`` none or full, or selective for every n-th layer: ``selective_ac_option = "n"`` recomputes layers n-1,
    2n-1, … Python configs (2026) know all layers or none: ``FullAC.Config()``, ``None``.
    """
    picked: list[str] = []
    mode, python = ['mode = "none"'], "None"
    if wanted.to_free:
        stride, picked = nearest_stride(wanted, lambda n: n - 1)
        mode = ['mode = "full"'] if stride == 1 else ['mode = "selective"', f'selective_ac_option = "{stride}"']
        python = "FullAC.Config()" + ("  (all layers: these have no stride)" if stride > 1 else "")
    lines = ["[activation_checkpoint]", *mode, f"# torchtitan with Python configs: activation_checkpoint={python}"]
    return Setting(lines, picked)


def megatron(wanted: LayerChoices) -> Setting:
    """Full recompute of the first n layers or of all; or offloading.

    ``--recompute-method block`` counts layers from the first; ``--cpu-offloading-num-layers n`` moves what the first n
    layers save, n less than all, and excludes recompute.
    """
    names, count = list(wanted.layers), len(wanted.to_free)
    if not count:
        return Setting(["# no flag is needed"], [])
    if wanted.all_are("offload") and count < len(names):
        flags = ["--cpu-offloading", f"--cpu-offloading-num-layers {count}"]
        notes = ("offloading needs Transformer Engine and takes no pipeline stages and no recompute",)
        return Setting(flags, names[:count], "offload", notes)
    if count == len(names):
        method, notes = ["--recompute-method uniform", "--recompute-num-layers 1"], ()
    else:
        method = ["--recompute-method block", f"--recompute-num-layers {count}"]
        notes = ("the number is per pipeline stage: divide it by the number of stages",)
    return Setting(["--recompute-granularity full", *method], names[:count], notes=notes)


TRAINERS: dict[str, Callable[[LayerChoices], Setting]] = {
    trainer.__name__: trainer for trainer in (transformers, trl, axolotl, torchtitan, megatron)
}
