"""The Trainer with a plan leaves the same weights as without, whatever else it does in between."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autockpt.errors import ConflictError, PlanError
from autockpt.integrations.transformers import AutockptCallback
from autockpt.schema.plan import Plan
from tests.errors import raises
from tests.integrations.runs import Runs, untouched
from tests.policies.zoo import CASES, assert_equal

pytestmark = pytest.mark.slow

LLAMA = CASES["llama"]
CHOICES = {"model.layers.0": "recompute", "model.layers.1": "save", "model.layers.2": "offload"}
PLAN = Plan(choices=CHOICES)
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 3}
ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(1, 64, (6, 64), generator=torch.Generator().manual_seed(3))
]
accelerate = pytest.importorskip("accelerate")


class Generates(transformers.TrainerCallback):
    """After every step."""

    def __init__(self) -> None:
        self.generated: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ids = ROWS[0]["input_ids"][None, :8]
        self.generated.append(
            kwargs["model"].generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=True)
        )


def arguments(folder: Path, **more: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    options = QUIET | {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    return transformers.TrainingArguments(output_dir=str(folder), **options | {"logging_strategy": "no"} | more)


def trainer(folder: Path, model: nn.Module, callbacks: list[Any], **more: Any) -> Any:
    return transformers.Trainer(
        model=model, args=arguments(folder, **more), train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=callbacks
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


BUSY = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize("more", [{}, BUSY | {"bf16": True}], ids=["plain", "busy in bf16"])
def test_the_same_weights_come_out(tmp_path, capfd, more):
    model, twin = LLAMA.make(), LLAMA.make()
    counted, plainly, callback = Runs(twin), Runs(model), AutockptCallback(PLAN)
    trainer(tmp_path / "without", model, [first := Generates()], **more).train()
    trainer(tmp_path / "with", twin, [callback, second := Generates()], **more).train()
    assert_equal(weights(twin), weights(model))
    assert counted.again == counted.trained >= 4 and plainly.again == 0
    assert counted.cached == plainly.cached >= 16  # tokens that were generated with a KV cache
    assert len(first.generated) == 4 and all(map(torch.equal, first.generated, second.generated))
    assert untouched(twin)
    assert callback.handle is not None and callback.handle.attached.keys() == CHOICES.keys()
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("autockpt: ")]
    assert "by hand" in line and "1 recompute, 1 save, 1 offload" in line
    if more:
        configs = [json.loads((tmp_path / w / "checkpoint-2" / "config.json").read_text()) for w in ("without", "with")]
        assert configs[0] == configs[1]
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "with" / "checkpoint-2")
        wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "without" / "checkpoint-2")
        assert_equal(weights(loaded), weights(wanted))


def test_a_plan_with_sets_goes_by_each_batch(tmp_path):
    sets = [{"when": {"tokens": 32}, "choices": {"model.layers.2": "recompute"}}]
    found = Plan.model_validate({"choices": CHOICES, "smaller_batches": sets})
    found.save(tmp_path / "plan.yaml")
    rows = [{name: value[: 64 if n % 4 else 16] for name, value in row.items()} for n, row in enumerate(ROWS * 4)]
    model, twin, callback = LLAMA.make(), LLAMA.make(), AutockptCallback(tmp_path / "plan.yaml")
    for which, callbacks in ((model, []), (twin, [callback])):
        made = trainer(tmp_path / "out", which, callbacks, per_device_train_batch_size=1, max_steps=12)
        made.train_dataset = rows
        made.train()
    assert_equal(weights(twin), weights(model))
    assert callback.handle is not None
    used = callback.handle._session.used
    assert used[0] > 0 and used[1] > 0 and used[0] + used[1] == 12


def test_a_run_is_resumed(tmp_path):
    whole = LLAMA.make()
    trainer(tmp_path / "whole", whole, [], save_strategy="steps", save_steps=2).train()
    resumed = LLAMA.make()
    callback = AutockptCallback(PLAN)
    trainer(tmp_path / "resumed", resumed, [callback]).train(str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(weights(resumed), weights(whole))
    assert callback.handle is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_adapters_on_a_base(tmp_path, frozen):
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear")
        model = peft.get_peft_model(LLAMA.make(), config)
        if not frozen:
            model.requires_grad_(True)
        return model

    model, twin = make(), make()
    counted = Runs(twin)
    trainer(tmp_path / "without", model, [Generates()]).train()
    trainer(tmp_path / "with", twin, [AutockptCallback(PLAN), Generates()], save_strategy="steps", save_steps=2).train()
    assert_equal(weights(twin), weights(model))
    assert counted.again == counted.trained == 4
    assert (tmp_path / "with" / "checkpoint-2" / "adapter_model.safetensors").exists()


def test_an_interrupted_run_can_be_tried_again(tmp_path):
    class Interrupt(transformers.TrainerCallback):
        on = True

        def on_step_end(self, args, state, control, **_):
            if self.on:
                raise KeyboardInterrupt

    model, interrupt, callback = LLAMA.make(), Interrupt(), AutockptCallback(PLAN)
    run = trainer(tmp_path, model, [callback, interrupt])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    interrupt.on = False
    run.train()
    assert untouched(model)


NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
SPELLINGS = [n for n in (NEW, OLD) if n in transformers.TrainingArguments.__dataclass_fields__]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("when", ["at once", "added later"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainers_own_is_an_error(tmp_path, spelling, when):
    callback = AutockptCallback(PLAN)
    options = {spelling: True}
    with raises(ConflictError, f"{spelling}", f"{SPELLINGS[0]}=False") as caught:
        run = trainer(tmp_path, LLAMA.make(), [callback] if when == "at once" else [], **options)
        run.add_callback(callback)
        run.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        arguments(tmp_path, **{SPELLINGS[0]: False})  # what the remedy says
    assert caught.value.message.count("=True") == 1  # the mirrored spelling is not named as a second conflict


@pytest.mark.parametrize("spelling", [None, SPELLINGS[0]])
def test_checkpointing_in_fsdp_config_is_an_error_as_well(tmp_path, spelling):
    options = {"fsdp_config": {NEW: True}, **({spelling: True} if spelling else {})}
    named = [NEW, "fsdp_config", *([f"{spelling}=False"] if spelling else [])]
    with raises(ConflictError, *named):
        trainer(tmp_path, LLAMA.make(), [AutockptCallback(PLAN)], **options)


def test_a_plan_of_another_model_is_found_before_training(tmp_path):
    with raises(PlanError, "h.0"):
        trainer(tmp_path, LLAMA.make(), [AutockptCallback({"h.0": "recompute"})]).train()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_trl(tmp_path, capfd, adapters):
    def train(folder: Path, callbacks: list[Any], **more: Any) -> tuple[dict[str, Tensor], Any]:
        run = sft(folder, callbacks, adapters, **more)
        run.train()
        return weights(run.model), run

    wanted, _ = train(tmp_path / "without", [], gradient_checkpointing=False)
    callback = AutockptCallback(PLAN)
    got, run = train(tmp_path / "with", [callback])  # TRL has its own on by default: the plan replaces it
    assert_equal(got, wanted)
    assert callback.handle is not None and untouched(run.model)
    assert not any(getattr(run.args, name, False) for name in SPELLINGS)
    assert capfd.readouterr().out.count("of SFTConfig, on by default there, is switched off") == 1
    late = sft(tmp_path / "late", [], adapters)
    late.add_callback(AutockptCallback(PLAN))
    late.train()
    assert_equal(weights(late.model), wanted)
    with raises(ConflictError, "activation_offloading"):
        train(tmp_path / "more", [AutockptCallback(PLAN)], activation_offloading=True)


def sft(folder: Path, callbacks: list[Any], adapters: bool = False, **more: Any) -> Any:
    """TRL's SFTTrainer on texts of different lengths."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    rows = datasets.Dataset.from_list(
        [{"text": " ".join(f"w{t % 62}" for t in r["input_ids"].tolist()[: 8 + n])} for n, r in enumerate(ROWS)]
    )
    options = arguments(folder).to_dict() | more
    kept = {k: options[k] for k in ("max_steps", "per_device_train_batch_size", "report_to", "use_cpu", "seed")}
    config = trl.SFTConfig(output_dir=str(folder), save_strategy="no", disable_tqdm=True, bf16=False, **kept | more)
    torch.manual_seed(0)
    return trl.SFTTrainer(
        model=LLAMA.make(),
        args=config,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear") if adapters else None,
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "</s>": 63}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")
