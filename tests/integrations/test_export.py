"""Settings of other trainers: what they do is asked of the trainer where it is installed, what they lose is said."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from autockpt.errors import PlanError, UsageError
from autockpt.integrations.export import TARGETS, LayerChoices, export, losses_of
from autockpt.schema import Comparison, Measurement, Plan
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
    return LayerChoices(layers, more.get("others", {}))


def nearest(wanted: LayerChoices, target: str) -> tuple[str, list[str]]:
    """The trainer's settings, and what is lost with them."""
    setting = TARGETS[target](wanted)
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("lists_head", [True, False])
def test_a_choice_for_the_output_head_is_named_as_lost(target: str, lists_head: bool) -> None:
    choices = {"model.layers.0-3": "recompute", "lm_head": {"kind": "chunked_softmax", "chunks": 8}}
    made = plan(choices)
    units = {**made.model.units, **({"lm_head": "Linear"} if lists_head else {})}
    made = made.model_copy(update={"model": Structure(units=units)})
    exported = export(made, target)
    assert any("lm_head" in loss and "chunked_softmax" in loss for loss in exported.losses)
    assert flags(exported.settings)


def flags(settings: str) -> list[str]:
    return [line for line in settings.splitlines() if not line.startswith("#")]


ALL = {f"model.layers.0-{LAYERS - 1}": "recompute"}
EVEN = {f"model.layers.{i}": "recompute" for i in range(0, LAYERS, 2)}
ODD = {f"model.layers.{i}": "recompute" for i in range(1, LAYERS, 2)}
FIRST = {"model.layers.0-4": "recompute"}
NONE = {"model.layers.0": "save"}


@pytest.mark.parametrize(
    ("choices", "layers", "exact"),
    [
        (ALL, range(8), True),
        (EVEN, range(0, 8, 2), True),
        (ODD, range(0, 8, 2), False),  # as many, others
        (FIRST, range(8), False),  # every second were too few
        (NONE, [], True),
    ],
)
def test_the_trainer_checkpoints_what_was_exported(choices, layers, exact, tmp_path):
    result = export(plan(choices), "transformers")
    assert checkpointed(result.settings, tmp_path) == list(layers)
    assert (not result.losses) is exact, result.losses


@pytest.mark.parametrize(
    ("choices", "mode", "option", "exact"),
    [
        (ALL, "full", None, True),
        (ODD, "selective", "2", True),
        (EVEN, "selective", "2", False),
        (FIRST, "full", None, False),
        (NONE, "none", None, True),
    ],
)
def test_torchtitan(choices, mode, option, exact):
    result = export(plan(choices), "torchtitan")
    table = tomllib.loads(result.settings)["activation_checkpoint"]
    assert (table["mode"], table.get("selective_ac_option")) == (mode, option)
    assert (not result.losses) is exact, result.losses


@pytest.mark.parametrize(
    ("asked", "lines", "losses"),
    [
        (wanted(all="recompute"), ["full", "uniform", "1"], 0),
        (wanted(at0="recompute", at1="recompute"), ["full", "block", "2"], 0),
        (wanted(at6="recompute", at7="recompute"), ["full", "block", "2"], 2),
        (wanted(at0="offload"), ["--cpu-offloading", "1"], 0),
        (wanted(all="offload"), ["full", "uniform", "1"], 1),
        (wanted(), ["#"], 0),
    ],
    ids=["all", "first", "last", "offload", "offload all", "none"],
)
def test_megatron(asked, lines, losses):
    settings, lost = nearest(asked, "megatron")
    assert [line.rpartition(" ")[2] for line in flags(settings)] == [x for x in lines if x != "#"], settings
    assert len(lost) == losses, lost


@pytest.mark.parametrize(
    ("asked", "keys", "losses"),
    [
        (wanted(), {"gradient_checkpointing": False}, 0),
        (wanted(all="recompute"), {"gradient_checkpointing": True}, 0),
        (wanted(at0="recompute"), {"gradient_checkpointing": True}, 1),
        (wanted(all="offload"), {"gradient_checkpointing": True, "activation_offloading": True}, 0),
        (wanted(at3="offload"), {"gradient_checkpointing": True, "activation_offloading": True}, 1),
        (
            wanted(all="recompute_offload"),
            {"gradient_checkpointing": True, "activation_offloading": "hidden_states"},
            0,
        ),
        (wanted(all="keep_attention"), {"gradient_checkpointing": True, "selective_checkpointing": True}, 0),
        (wanted(all="recompute", at0="offload"), {"gradient_checkpointing": True}, 1),
    ],
)
def test_axolotl(asked, keys, losses):
    settings, lost = nearest(asked, "axolotl")
    assert yaml.safe_load(settings) == keys
    assert len(lost) == losses, lost


@pytest.mark.parametrize(
    ("asked", "on", "offloading", "losses"),
    [
        (wanted(), False, None, 0),
        (wanted(all="recompute"), True, None, 0),
        (wanted(all="offload"), False, True, 0),
        (wanted(at3="offload"), False, True, 1),
        (wanted(all="recompute_offload"), True, True, 0),
        (wanted(all="recompute", at0="offload"), True, True, 2),
        (wanted(all="recompute", at0="save", at1="recompute_offload"), True, True, 2),
    ],
)
def test_trl(asked, on, offloading, losses):
    text, lost = nearest(asked, "trl")
    settings = yaml.safe_load(text)
    assert settings["gradient_checkpointing"] is on and settings.get("activation_offloading") is offloading
    assert len(lost) == losses, lost


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["recompute", "offload", "recompute_offload", "keep_attention", "selective"])
@pytest.mark.parametrize("freed", [1, 3, 7, 8])
def test_no_less_is_freed_than_planned(target, kind, freed):
    _, lost = nearest(wanted(**{f"at{i}": kind for i in range(freed)}), target)
    assert "more memory" not in " ".join(lost)
    assert lost or freed in (1, 8) or target == "megatron"


def test_a_part_of_a_layer_frees_the_layer():
    result = export(plan({"model.layers.3.mlp": "recompute"}), "transformers")
    assert yaml.safe_load(result.settings)["gradient_checkpointing_kwargs"] == {"every_n_layers": 8}
    assert any("model.layers.3: `save` instead of `recompute (of mlp)`" in loss for loss in result.losses)
    result = export(plan({"model.layers.0.mlp": "recompute"}), "transformers")
    assert any("`recompute` instead of `recompute (of mlp)`" in loss for loss in result.losses)


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_says_that_it_loses_sets_for_small_batches(target):
    other = plan({"model.layers.0-7": "save"}).model_copy(update={"when": When(tokens=64)})
    found = export(plan({"model.layers.0-7": "recompute"}).with_smaller([other]), target)
    assert found.losses and "1 more sets of choices, for smaller batches" in found.settings


def test_a_plan_that_lists_no_layers_is_an_error():
    for made in (Plan(choices={"h.0-2": "recompute"}), Plan(choices={"lm_head": "recompute"})):
        with raises(PlanError):
            export(made, "megatron")


def test_an_unknown_trainer():
    with raises(UsageError, "mega", "megatron"):
        export(plan(ALL), "mega")


def test_what_the_search_knows_of_the_exported_setting_is_printed():
    row = Comparison(name="recompute all", verdict="fits", measured=Measurement(peak_bytes=2**30, step_seconds=0.5))
    made = plan({"model.layers.0-4": "recompute"}).model_copy(update={"baselines": (row,)})
    assert any("500 ms" in note and "1.00 GiB" in note for note in export(made, "transformers").notes)
    assert not any("500 ms" in note for note in export(made, "megatron").notes), "the first five layers alone"
