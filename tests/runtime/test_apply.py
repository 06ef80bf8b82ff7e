import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt.errors import PlanError, RunDirectoryError, UsageError
from autockpt.runtime import apply, attached_path
from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, DeviceInfo, Environment, Measurement, Plan, WorkloadSpec
from autockpt.schema.choices import CHUNKED_SOFTMAX
from autockpt.schema.run_directory import RunDirectory
from autockpt.workload import discover_units
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal, plain, train

LLAMA = CASES["llama"]


def measured(model: nn.Module, choices: dict[str, Any], **more: Any) -> Plan:
    units = discover_units(model)
    defaults = {
        "settings": {"dtype": "fp32", "batch_size": 6, "seq_len": 64},
        "workload": WorkloadSpec(model="tiny"),
        "environment": Environment(device=DeviceInfo(kind="cpu", name="CPU", capacity_bytes=1), versions={}),
        "measured": Measurement(peak_bytes=1, step_seconds=1.0),
    }
    full = {u.name: choices.get(u.name, SAVE) for u in units if u.role == "block"}
    return Plan.create(full, units, source="measured", **(defaults | more))


@pytest.fixture(autouse=True)
def no_other_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_a_plan_file_in_three_lines(tmp_path):
    (tmp_path / "plan.yaml").write_text(
        "autockpt: 1\nchoices:\n  model.layers.0-1: recompute\n  model.layers.2: offload\n"
    )
    model = LLAMA.make()
    with autockpt.apply(model, tmp_path / "plan.yaml") as handle:
        assert_equal(train(model, LLAMA), plain(LLAMA))
        text = str(handle)
        assert "unmeasured (the plan was written by hand), applied" in text
        assert "model.layers.0-1  recompute" in text
        assert "model.layers.2    offload" in text
        assert list(handle.attached) == [f"model.layers.{i}" for i in range(3)]
        assert handle.choices["model.layers.2"] == OFFLOAD
    assert "removed" in str(handle)
    handle.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_runs_directory_is_its_plan(tmp_path):
    run = RunDirectory.enter(tmp_path / "run", {"budget": "60%"})
    with raises(RunDirectoryError):
        autockpt.apply(LLAMA.make(), run.path)
    run.write_plan(Plan(choices={"model.layers.0": "recompute"}))
    with autockpt.apply(LLAMA.make(), str(run.path)) as handle:
        assert handle.choices["model.layers.0"].kind == "recompute"


def test_choices_by_name_that_are_none_are_named():
    model = LLAMA.make()
    with raises(PlanError, "model.layers.1", "'recompue'"):
        autockpt.apply(model, {"model.layers.0": "save", "model.layers.1": "recompue"})
    with raises(PlanError):
        autockpt.apply(model, {"autockpt": 1, "choices": {"model.layers.0": "recompute"}})
    with raises(PlanError):
        autockpt.apply(model, {0: "recompute"})  # type: ignore[dict-item]
    with raises(UsageError):
        autockpt.apply("plan.yaml", model)  # type: ignore[arg-type]


def test_the_handle_tells_what_was_checked():
    model = LLAMA.make()
    plan = Plan(choices={"model.layers.0": RECOMPUTE, "model.layers.1": OFFLOAD})
    for mode, checked in (("sample", ["model.layers.0", "model.layers.1"]), ("all", plan.choices), ("off", [])):
        with apply(model, plan, sentinels=mode) as handle:
            train(model, LLAMA)
            proof = handle.sentinels
        assert proof.mode == mode and list(proof.units) == list(checked)
        assert all(unit.checks for unit in proof.units.values())
    with raises(UsageError, "'some'"):
        apply(model, plan, sentinels="some")


def test_plans_of_another_model_are_refused():
    model = LLAMA.make()
    plan = measured(model, {"model.layers.1": RECOMPUTE})
    for other in ("gpt2", "sequential"):
        with raises(PlanError) as caught:
            apply(CASES[other].make(), plan)
        assert caught.value.remedy
    smaller = LLAMA.make()
    del smaller.model.layers[2]
    with raises(PlanError, "model.layers.2"):
        apply(smaller, plan)
    with raises(PlanError):
        apply(nn.Linear(2, 2), plan)
    with raises(PlanError):
        apply(model, Plan(choices={"model.layer.0": RECOMPUTE}))
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {"dtype": "bf16"}}, "the weights are fp32, planned as bf16"),
        ({"workload": WorkloadSpec(model="tiny", lora=4)}, "planned with LoRA adapters"),
        (
            {"environment": Environment(device=DeviceInfo(kind="cuda", name="GPU", capacity_bytes=1), versions={})},
            "the model is on cpu, planned for cuda",
        ),
    ],
)
def test_other_circumstances_are_one_warning(change, words):
    model = LLAMA.make()
    with pytest.warns(UserWarning, match="promise does not hold here") as caught:
        handle = apply(model, measured(model, {"model.layers.1": RECOMPUTE}, **change))
    assert len(caught) == 1
    assert words in str(caught[0].message)
    assert f"note: {words}" in str(handle)
    assert caught[0].filename == __file__
    handle.remove()
    with warnings.catch_warnings(), pytest.raises(UserWarning):
        warnings.simplefilter("error")
        apply(model, measured(model, {"model.layers.1": RECOMPUTE}, **change))
    assert attached_path(model) is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_plans_apply_under_prompt_tuning_and_name_the_heads():
    peft = pytest.importorskip("peft")
    plan = Plan(choices={"model.layers.1": RECOMPUTE, "lm_head": CHUNKED_SOFTMAX})
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(LLAMA.make(), prompts)
    attached = apply(model, plan).attached
    with model.eval().disable_adapter():  # has the base's forward in the place of its own
        assert torch.equal(model(**LLAMA.batch()).loss, model.base_model(**LLAMA.batch()).loss)
    assert attached["layers.1"].startswith("recompute")
    assert attached["base_model.lm_head"].startswith("chunked_softmax")
    for other, name in (LLAMA.make(), "lm_hed"), (model, "somewhere"):
        with pytest.raises(PlanError) as caught:
            apply(other, Plan(choices={name: RECOMPUTE}))
        assert "lm_head" in caught.value.remedy


def test_a_larger_batch_than_planned_is_one_warning():
    model = LLAMA.make()
    longer = {k: torch.cat([v, v]) for k, v in LLAMA.batch().items()}
    with apply(model, measured(model, {"model.layers.1": RECOMPUTE})):
        model(**{k: v[:1, :8] for k, v in LLAMA.batch().items()})
        with warnings.catch_warnings(action="error"):  # tokens are what counts, whatever comes first
            model(logits_to_keep=torch.zeros(100, dtype=torch.long), input_ids=LLAMA.batch()["input_ids"])
        with pytest.warns(UserWarning, match="8 × 48 is larger than the plan was made for"):
            model(**longer)
        model(**longer)


def test_a_wrong_limit_applies_nothing() -> None:
    model = LLAMA.make()
    plan = Plan(choices={"model.layers.*": RECOMPUTE})
    for wrong in ("7", "60%"):
        with pytest.raises(UsageError):
            apply(model, plan, adaptive=wrong)
    apply(model, plan).remove()  # nothing is on it
