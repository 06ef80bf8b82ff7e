"""TRL's trainers that make their batches while they train: the same with a plan as without one."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from autockpt.devices.cpu import allocator_peak
from autockpt.errors import UsageError
from autockpt.integrations.transformers import AutockptCallback
from autockpt.schema import WorkloadSpec
from autockpt.schema.plan import Plan
from autockpt.tracing import Tracer
from autockpt.workload.storages import nested_tensors, storage_bytes
from tests.errors import raises
from tests.integrations.runs import Runs, untouched
from tests.integrations.test_transformers import LLAMA, QUIET, accelerate, tokenizer, weights
from tests.policies.zoo import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

ADAPTERS = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear")
STEPS = 20
PROMPT, COMPLETION = 24, 104
LAYERS = "model.layers.*"
MIXED = {
    "model.layers.0": {"kind": "selective", "keep": ["fused_attention", "mlp.up_proj"]},
    "model.layers.1": "recompute_offload",
    "model.layers.2": {"kind": "remake", "keep": ["**"]},
}
PLANS: dict[str, dict[str, Any]] = {
    **{kind: {LAYERS: kind} for kind in ("recompute", "selective", "remake", "offload")},
    "mixed": MIXED,
}


class Watched(Runs):
    """Notes the loss of every micro-batch, too."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.model)
        self.losses: list[Tensor] = []
        step = trainer.training_step

        def noted(*args: Any, **kwargs: Any) -> Tensor:
            self.losses.append((loss := step(*args, **kwargs)).clone())
            return loss

        trainer.training_step = noted


def trainer(cls: str, folder: Path, lora: Any, callbacks: list[Any], **more: Any) -> Any:
    """On random weights, with a reference: the layers themselves without their adapters, or a model of its own.

    GRPO and RLOO take two optimizer steps of two micro-batches for each generation, under autocast with adapters.
    """
    accelerate.state.AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    LLAMA.make().save_pretrained(folder / "model")  # a reference is loaded from where the model is from
    model = more.pop("model", None) or transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    lengths = [PROMPT if n % 4 else PROMPT // 2 for n in range(8)]
    prompts = [" ".join(f"w{n * i % 61}" for i in range(length)) for n, length in enumerate(lengths)]
    options = QUIET | {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"beta": 0.04, "learning_rate": 1e-2, "bf16": lora is not None, "logging_steps": 1}
    if cls == "OnlineDPO":
        library, more = importlib.import_module("trl.experimental.online_dpo"), {"max_new_tokens": 12} | more
    else:
        library, more = trl, {"steps_per_generation": 4, "num_generations": 2, "max_completion_length": 12} | more
    return getattr(library, f"{cls}Trainer")(
        model=model,
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        args=getattr(library, f"{cls}Config")(output_dir=str(folder), **options | more),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=lora,
    )


def trained(run: Any) -> tuple[dict[str, Tensor], Watched]:
    watched = Watched(run)
    run.train()
    assert untouched(run.model)
    return weights(run.model), watched


@pytest.fixture(scope="module")
def plainly(tmp_path_factory):
    """What training leaves without a plan, by trainer and adapters."""
    known: dict[Any, Any] = {}

    def get(cls: str, adapters: bool) -> tuple[dict[str, Tensor], Watched]:
        if (cls, adapters) not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[cls, adapters] = trained(
                trainer(cls, folder, ADAPTERS if adapters else None, [], gradient_checkpointing=False)
            )
        return known[cls, adapters]

    return get


CASES = [("GRPO", adapters, name) for adapters in (False, True) for name in PLANS] + [
    (cls, adapters, "mixed") for cls in ("RLOO", "OnlineDPO") for adapters in (False, True)
]


@pytest.mark.parametrize(("cls", "adapters", "name"), CASES)
def test_losses_and_weights_are_those_without_a_plan(tmp_path, plainly, cls, adapters, name):
    wanted, plain = plainly(cls, adapters)
    callback = AutockptCallback(Plan(choices=PLANS[name]))
    got, watched = trained(trainer(cls, tmp_path, ADAPTERS if adapters else None, [callback]))
    assert len(watched.losses) == 2 * STEPS and len({float(loss) for loss in watched.losses}) > STEPS
    assert_equal(dict(enumerate(watched.losses)), dict(enumerate(plain.losses)))
    assert_equal(got, wanted)
    # log-probabilities, references and generation in between run as ever, with their cache, and nothing runs again
    counts = (watched.trained, watched.looked, watched.cached)
    assert counts == (plain.trained, plain.looked, plain.cached) and min(counts) > 0 and plain.again == 0
    assert watched.again == (0 if name in ("offload", "remake") else watched.trained)


JOBS: dict[str, dict[str, Any]] = {"all weights": {}, "adapters": {"lora": 8, "autocast": "bf16"}}


@pytest.mark.parametrize("choice", ["save", "recompute", "offload"])
@pytest.mark.parametrize("job", JOBS)
def test_the_described_step_peaks_as_the_trainers(tmp_path, job, choice):
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=6, vocab_size=64, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    sizes = {"batch_size": 4, "seq_len": PROMPT + COMPLETION, "max_grad_norm": 1.0, "optimizer": "adamw_fused"}
    spec = WorkloadSpec(model=str(tmp_path), grpo_prompt_len=PROMPT, **sizes, **JOBS[job])
    with Tracer.from_spec(spec) as tracer:
        plan = Plan(choices={unit.name: choice for unit in tracer.units if unit.role == "block"})
        promised = tracer.trace(plan.choices).peak_bytes
    lora = peft.LoraConfig(r=8, lora_alpha=16) if JOBS[job] else None
    more = {"steps_per_generation": 2, "max_completion_length": COMPLETION, "max_steps": 2, "beta": 0.0}
    more |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "pad_to_multiple_of": None}
    more |= {"generation_kwargs": {"min_new_tokens": COMPLETION}}
    run = trainer("GRPO", tmp_path, lora, [AutockptCallback(plan)], model=transformers.LlamaForCausalLM(config), **more)
    peaks, step = list[int](), run.training_step

    def measured(*args: Any) -> Tensor:
        """The second step is on completions of the first one's, and has the optimizer's states."""
        resident = storage_bytes(nested_tensors(run.model, run.optimizer, run._buffered_inputs, args))
        losses = list[Tensor]()
        peaks.append(resident + allocator_peak(lambda: losses.append(step(*args))))
        return losses[0]

    run.training_step = measured
    run.train()
    print(f"{job}, {choice}: promised {promised:,}, measured {peaks[1]:,}, {promised / peaks[1] - 1:+.2%}")
    assert abs(promised / peaks[1] - 1) < 0.02


def test_a_search_is_refused_with_the_job_to_describe(tmp_path):
    with raises(UsageError, "grpo_prompt_len"):
        trainer("GRPO", tmp_path, None, [AutockptCallback(budget="24GB")]).train()
