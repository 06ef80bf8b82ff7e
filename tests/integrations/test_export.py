"""Settings of other trainers: what they do is asked of the trainer where it is installed, what they lose is said."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from autockpt.errors import PlanError
from autockpt.integrations.export import TRAINERS, LayerChoices, export, losses_of
from autockpt.schema import Comparison, Measurement, Plan, ResolvedBudget
from autockpt.schema.plan import Structure, When
from tests.errors import raises

LAYERS = 8


def plan(choices: dict[str, Any], layers: int = LAYERS) -> Plan:
    units = {f"model.layers.0-{layers - 1}": "LlamaDecoderLayer"}
    units |= {f"model.layers.0-{layers - 1}.{part}": part for part in ("self_attn", "mlp")}
    return Plan(model=Structure(units=units), choices=choices)


def wanted(**more: Any) -> LayerChoices:
    """Kinds by layer number, for choices that this version may not have."""
    layers = {f"model.layers.{i}": more.get(f"at{i}", more.get("all", "save")) for i in range(LAYERS)}
    return LayerChoices(layers, more.get("others", {}), more.get("adapters", False))


def nearest(wanted: LayerChoices, trainer: str) -> tuple[str, list[str]]:
    """The trainer's settings, and what is lost with them."""
    setting = TRAINERS[trainer](wanted)
    return "\n".join(setting.lines), list(losses_of(wanted, setting))


def checkpointed(settings: str, folder: Path) -> list[int]:
    """The layers that the Trainer checkpoints with these arguments."""
    exported = yaml.safe_load(settings)
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], **exported)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=[])
    flags: dict[str, Any] = {}

    class Seen(Exception):
        pass

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            flags["on"] = [i for i, layer in enumerate(model.model.layers) if layer.gradient_checkpointing]
            raise Seen

    trainer.train_dataset = [{"input_ids": [1, 2], "labels": [1, 2]}]  # type: ignore[assignment]
    trainer.add_callback(Look())
    with pytest.raises(Seen):
        trainer.train()
    return flags["on"]


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("lists_head", [True, False])
def test_a_choice_for_the_output_head_is_named_as_lost(trainer: str, lists_head: bool) -> None:
    choices = {"model.layers.0-3": "recompute", "lm_head": {"kind": "chunked_softmax", "chunks": 8}}
    made = plan(choices)
    units = {**made.model.units, **({"lm_head": "Linear"} if lists_head else {})}
    made = made.model_copy(update={"model": Structure(units=units)})
    exported = export(made, trainer)
    assert any("lm_head" in loss and "chunked_softmax" in loss for loss in exported.losses)
    assert flags(exported.settings)


def flags(settings: str) -> list[str]:
    return [line for line in settings.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("choices", "layers", "exact"),
    [
        ({"model.layers.*": "recompute"}, range(8), True),
        ({f"model.layers.{i}": "recompute" for i in range(0, LAYERS, 2)}, range(0, 8, 2), True),
        ({f"model.layers.{i}": "recompute" for i in range(1, LAYERS, 2)}, range(0, 8, 2), False),  # as many, others
        ({"model.layers.0-4": "recompute"}, range(8), False),  # every second were too few
        ({"model.layers.0": "save"}, [], True),
    ],
)
def test_the_trainer_checkpoints_what_was_exported(choices, layers, exact, tmp_path):
    result = export(plan(choices), "transformers")
    assert checkpointed(result.settings, tmp_path) == list(layers)
    assert (not result.losses) is exact, result.losses


def settings_of(text: str, trainer: str) -> dict[str, Any]:
    if trainer == "torchtitan":
        return tomllib.loads(text)["activation_checkpoint"]
    if trainer == "megatron":
        return {flag: value for flag, _, value in (line.partition(" ") for line in flags(text))}
    return yaml.safe_load(text)


ON, OFF, AWAY = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}, {"activation_offloading": True}
FULL = {"--recompute-granularity": "full"}
SECOND = {"mode": "selective", "selective_ac_option": "2"}
# what a trainer is asked for, its settings, and how many losses are named
EXPORTED: list[tuple[str, LayerChoices, dict[str, Any], int]] = [
    ("torchtitan", wanted(all="recompute"), {"mode": "full"}, 0),
    ("torchtitan", wanted(**{f"at{i}": "recompute" for i in (1, 3, 5, 7)}), SECOND, 0),
    ("torchtitan", wanted(**{f"at{i}": "recompute" for i in (0, 2, 4, 6)}), SECOND, 2),
    ("torchtitan", wanted(**{f"at{i}": "recompute" for i in range(5)}), {"mode": "full"}, 1),
    ("torchtitan", wanted(), {"mode": "none"}, 0),
    ("megatron", wanted(all="recompute"), FULL | {"--recompute-method": "uniform", "--recompute-num-layers": "1"}, 0),
    ("megatron", wanted(at0="recompute", at1="recompute"), FULL | {"--recompute-num-layers": "2"}, 0),
    ("megatron", wanted(at6="recompute", at7="recompute"), FULL | {"--recompute-num-layers": "2"}, 2),
    ("megatron", wanted(at0="offload"), {"--cpu-offloading": "", "--cpu-offloading-num-layers": "1"}, 0),
    ("megatron", wanted(all="offload"), FULL | {"--recompute-method": "uniform", "--recompute-num-layers": "1"}, 1),
    ("megatron", wanted(), {}, 0),
    ("axolotl", wanted(), OFF, 0),
    ("axolotl", wanted(all="recompute"), ON, 0),
    ("axolotl", wanted(at0="recompute"), ON, 1),
    ("axolotl", wanted(all="offload"), ON | AWAY, 1),  # which recomputes all layers where all weights train
    ("axolotl", wanted(all="offload", adapters=True), ON | AWAY, 0),
    ("axolotl", wanted(at3="offload", adapters=True), ON | AWAY, 1),
    ("axolotl", wanted(all="recompute_offload"), ON | {"activation_offloading": "hidden_states"}, 0),
    ("axolotl", wanted(all="keep_attention"), ON | {"selective_checkpointing": True}, 0),
    ("axolotl", wanted(all="recompute", at0="offload"), ON, 1),
    ("trl", wanted(), OFF, 0),
    ("trl", wanted(all="recompute"), ON, 0),
    ("trl", wanted(all="offload"), OFF | AWAY, 0),
    ("trl", wanted(at3="offload"), OFF | AWAY, 1),
    ("trl", wanted(all="recompute_offload"), ON | AWAY, 0),
    ("trl", wanted(all="recompute", at0="offload"), ON | AWAY, 2),
    ("trl", wanted(all="recompute", at0="save", at1="recompute_offload"), ON | AWAY, 2),
]


@pytest.mark.parametrize(("trainer", "asked", "settings", "losses"), EXPORTED)
def test_settings_are_the_nearest_and_losses_are_named(trainer, asked, settings, losses):
    text, lost = nearest(asked, trainer)
    found = settings_of(text, trainer)
    assert found | settings == found and len(lost) == losses, (text, lost)
    for name in ("activation_offloading", "selective_checkpointing", "--recompute-granularity", "--cpu-offloading"):
        assert (name in found) == (name in settings)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("kind", ["recompute", "offload", "recompute_offload", "keep_attention", "selective"])
@pytest.mark.parametrize("freed", [1, 3, 7, 8])
def test_no_less_is_freed_than_planned(trainer, kind, freed):
    _, lost = nearest(wanted(**{f"at{i}": kind for i in range(freed)}), trainer)
    assert "more memory" not in " ".join(lost)
    assert lost or freed in (1, 8) or trainer == "megatron"


def test_a_part_of_a_layer_frees_the_layer():
    result = export(plan({"model.layers.3.mlp": "recompute"}), "transformers")
    assert yaml.safe_load(result.settings)["gradient_checkpointing_kwargs"] == {"every_n_layers": 8}
    assert any("model.layers.3: `save` instead of `recompute (of mlp)`" in loss for loss in result.losses)
    result = export(plan({"model.layers.0.mlp": "recompute"}), "transformers")
    assert any("`recompute` instead of `recompute (of mlp)`" in loss for loss in result.losses)
    result = export(plan({"model.layers.0.mlp": "recompute", "model.layers.0.self_attn": "offload"}), "transformers")
    assert any("offload (of self_attn)" in loss and "recompute (of mlp)" in loss for loss in result.losses)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_export_says_that_it_loses_sets_for_small_batches(trainer):
    other = plan({"model.layers.0-7": "save"}).model_copy(update={"when": When(tokens=64)})
    found = export(plan({"model.layers.0-7": "recompute"}).with_smaller([other]), trainer)
    assert found.losses and "1 more sets of choices, for smaller batches" in found.settings


def test_a_plan_that_lists_no_layers_is_an_error():
    for made in (Plan(choices={"h.0-2": "recompute"}), Plan(choices={"lm_head": "recompute"})):
        with raises(PlanError, "lists no layers"):
            export(made, "megatron")


def test_what_the_search_knows_of_the_exported_setting_is_printed():
    row = Comparison(name="recompute all", verdict="fits", measured=Measurement(peak_bytes=2**30, step_seconds=0.5))
    made = plan({"model.layers.0-4": "recompute"}).model_copy(update={"baselines": (row,)})
    assert any(note.endswith("500 ms a step, peak 1.00 GiB") for note in export(made, "transformers").notes)
    small = ResolvedBudget(asked="1GB", bytes=10**9)
    tight = made.model_copy(update={"budget": small})
    assert any(note.endswith("peak 1.00 GiB, over the budget") for note in export(tight, "transformers").notes)
    assert not any("500 ms" in note for note in export(made, "megatron").notes), "the first five layers alone"
