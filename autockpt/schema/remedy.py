"""What would make a job fit that no plan alone makes fit, and how each change is called where the job is written."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from autockpt.schema.base import Data


class Alternative(Data):
    """A change of the job that fits the budget, ghost-run. Nothing of it was measured."""

    options: str = Field(description="what to write where the job is described, as --batch-size 1 --accumulate 2")
    effect: str = Field(description="what changes for the training, in words")
    plan: str = Field(description="the uniform choice that was simulated")
    peak_bytes: int = Field(description="simulated, the device's own overhead included")
    spare_bytes: int | None = Field(default=None, description="what it leaves of the budget")
    step_seconds: float | None = Field(default=None, description="simulated; None where rates are only nominal")
    relative_cost: float = Field(
        description="simulated seconds per token (or row) over those of the leanest plan of the job as it was asked for"
    )


@dataclass(frozen=True)
class Terms:
    """The words for a change where the user would make it; ``smaller`` names the sorts of changes in a sentence."""

    batch: str
    chunks: str
    optimizer: str
    length: str
    lora: str
    quantised: str
    smaller: str
    between: str = ", "

    def joined(self, *options: str) -> str:
        """Several changes as one."""
        return self.between.join(filter(None, options))


_FOUR_BITS = (
    'from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype={dtype}))"
)
_QUANTISED = "on a base in 4 bits: from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True))"
COMMAND_LINE = Terms(
    batch="--batch-size {rows} --accumulate {accumulate}",
    chunks="--allow-inexact",
    optimizer="--optimizer {name}",
    length="--seq-len {length}",
    lora="--lora {rank}",
    quantised="--load-in-4bit",
    smaller="use a smaller --batch-size (with --accumulate to keep its effect), a shorter --seq-len, --lora, or "
    "--optimizer sgd",
    between=" ",
)
STEP = Terms(
    batch="a batch of {rows} in Step(…, accumulate={accumulate})",
    chunks="allow_inexact=True",
    optimizer="Step(…, optimizer=torch.optim.SGD(…))",
    length="sequences of {length} tokens",
    lora="peft.get_peft_model(model, LoraConfig(r={rank}))",
    quantised=_FOUR_BITS,
    smaller="use fewer rows in the batch (with accumulate= to keep their effect), shorter sequences, adapters "
    f"({_QUANTISED}), or SGD",
)
TRAINER = Terms(
    batch="per_device_train_batch_size={rows}, gradient_accumulation_steps={accumulate}",
    chunks="AutockptCallback(allow_inexact=True, …)",
    optimizer='optim="sgd"',
    length="sequences of at most {length} tokens (max_length in TRL, else where texts are tokenized)",
    lora="peft.get_peft_model(model, LoraConfig(r={rank})) (in TRL peft_config=LoraConfig(r={rank}))",
    quantised=_FOUR_BITS,
    smaller="use a smaller per_device_train_batch_size (with gradient_accumulation_steps to keep its effect), shorter "
    f'sequences, adapters ({_QUANTISED}), or optim="sgd"',
)
LIGHTNING = Terms(
    batch="DataLoader(batch_size={rows}), Trainer(accumulate_grad_batches={accumulate})",
    chunks="AutockptLightningCallback(allow_inexact=True, …)",
    optimizer="torch.optim.SGD in configure_optimizers",
    length="sequences of at most {length} tokens from the DataLoader",
    lora="peft.get_peft_model(model, LoraConfig(r={rank}))",
    quantised=_FOUR_BITS,
    smaller="use a smaller batch_size in the DataLoader (with accumulate_grad_batches to keep its effect), shorter "
    f"sequences, adapters ({_QUANTISED}), or SGD",
)
