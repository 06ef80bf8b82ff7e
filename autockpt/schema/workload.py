"""The description of a training step (``WorkloadSpec``): every setting that changes its bytes or seconds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from autockpt.errors import UsageError
from autockpt.schema.base import Data, did_you_mean, first_violation

Dtype = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adamw_fused", "adamw8bit", "adafactor", "sgd", "none"]
Ddp = Literal["buckets", "views"]

OPTIONS = (
    "model", "batch_size", "seq_len", "packed", "dtype", "autocast", "optimizer", "accumulate", "lora", "load_in_4bit"
)  # fmt: skip
"""Fields with an option of their own on the command line; the others are keys of a job file."""
SIMULATED = ("master_weights", "keep_gradients", "ddp", "shard")
"""Fields that no process can follow by itself: simulated hardware, and some of them the ranks of a job."""
SEEDS = 1 << 32  # NumPy takes no larger ones
MOST = 1 << 24  # sequences of a batch, or tokens of a sequence
SHARDED = re.compile(r"([1-9]\d{0,3}x)?[1-9]\d{0,3}( kept)?|tp[1-9]\d{0,3}")
"""``shard``: over so many GPUs, or replicas of so many shards each; layers that stay gathered from forward to backward
(``reshard_after_forward=False``); or tensor parallelism."""


_STAGE = re.compile(r"(?:(\d{1,3})/)?([1-9]\d{0,3}(?:,[1-9]\d{0,3})*)( gpipe| 1f1b)?")


class Stage(NamedTuple):
    """``stage``: so many stages come before it (None: all stages are meant), of ``count``, each of so many ``layers``.

    ``layers`` None: as many in each, as far as they can be divided.
    """

    number: int | None
    count: int
    layers: tuple[int, ...] | None
    schedule: str

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Raises ValueError for what is none, in words for people."""
        match = _STAGE.fullmatch(text)
        sizes = [int(size) for size in match[2].split(",")] if match is not None else [0]
        count = len(sizes) if len(sizes) > 1 else sizes[0]
        if match is None or (match[1] is not None and int(match[1]) >= count):
            raise ValueError(
                "4 (all of four stages), 0/4, 1/4, 0/4 gpipe or 0/4 1f1b is needed: a stage, counted from 0, of so "
                "many; or 1/9,9,8,6 with the layers of each. Zero-bubble schedules run backward in two halves and keep "
                "until the second what was recomputed for the first: they are not planned for, nor are several stages "
                "on one GPU"
            )
        number = None if match[1] is None else int(match[1])
        return cls(number, count, tuple(sizes) if len(sizes) > 1 else None, (match[3] or "").strip())

    def single(self) -> list[str]:
        """Each stage of this pipeline as ``stage`` names it."""
        cut = ",".join(map(str, self.layers)) if self.layers else str(self.count)
        return [f"{i}/{cut} {self.schedule}".strip() for i in range(self.count)]


def _stage(value: str | int) -> str:
    Stage.parse(str(value))
    return str(value)


def _sharded(value: int | str) -> int | str:
    if not SHARDED.fullmatch(str(value)):
        raise ValueError("8, 2x4, 8 kept, 2x4 kept or tp8 is needed, with numbers of GPUs of your own")
    return value


class WorkloadSpec(Data):
    """A reproducible description of the user's training step; enough for a fresh process to build it again.

    ``None`` for dtype, batch size or sequence length means the default of the named shape. One measured *cycle* is
    ``accumulate`` micro-batches of ``batch_size`` × ``seq_len``, then clipping and the optimizer.
    """

    model: str = Field(description="hub id, directory, config.json, built-in shape, or package.module:factory")
    batch_size: int | None = Field(default=None, gt=0, le=MOST)
    seq_len: int | None = Field(default=None, gt=0, le=MOST, description="tokens per sequence (text models)")
    packed: bool = Field(default=False, description="no padding, so no attention mask")
    dtype: Dtype | None = Field(default=None, description="type of the weights")
    autocast: Literal["bf16", "fp16"] | None = None
    attn: str | None = Field(default=None, description="attn_implementation; None: transformers' own default")
    liger: bool = Field(default=False, description="Liger Kernel's kernels, as transformers applies them")
    optimizer: OptimizerName = "adamw"
    scaler: bool = Field(default=False, description="scale the loss (fp16 autocast)")
    accumulate: int = Field(default=1, gt=0, description="micro-batches per optimizer step")
    max_grad_norm: float | None = Field(default=None, gt=0)
    lora: Annotated[int, Field(gt=0)] | dict[str, Any] | None = Field(
        default=None, description="LoRA's rank, or arguments of peft.LoraConfig; None: all parameters train"
    )
    load_in_4bit: bool = Field(default=False, description="base weights in NF4 with double quantisation (bitsandbytes)")
    quantization: dict[str, Any] | None = Field(default=None, description="transformers' quantization_config")
    prepare_kbit: bool = Field(default=False, description="PEFT's prepare_model_for_kbit_training: the rest in fp32")
    units: str | None = Field(
        default=None, description="patterns of module names with commas, to choose for; None: repeated blocks, or cuts"
    )
    trust_remote_code: bool = False
    seed: int = Field(default=0, ge=0, lt=SEEDS)
    master_weights: bool = Field(default=False, description="fp32 copies of 16-bit weights for optimizers; simulated")
    keep_gradients: bool = Field(default=False, description="gradients are set to zero, not to None; simulated")
    ddp: Ddp | None = Field(default=None, description="DDP: gradients copied to buckets, or views of them; see shard")
    shard: Annotated[int | str, AfterValidator(_sharded)] | None = Field(
        default=None,
        description="over N GPUs by FSDP2 (ZeRO-3), or NxM, 'N kept', 'NxM kept', tpN; simulated or by torchrun",
    )

    grpo_prompt_len: int | None = Field(
        default=None, gt=0, le=MOST, description="TRL's GRPO or RLOO step: tokens of seq_len that are the prompt"
    )
    stage: Annotated[str, BeforeValidator(_stage)] | None = Field(
        default=None, description="a stage of a pipeline ('1/4', '1/4 gpipe'), or all ('4'); accumulate micro-batches"
    )

    @model_validator(mode="after")
    def _has_completions(self) -> Self:
        if self.grpo_prompt_len is not None and self.seq_len is not None and self.grpo_prompt_len >= self.seq_len:
            raise ValueError("grpo_prompt_len has to be below seq_len, which counts prompt and completion")
        return self

    @cached_property
    def files(self) -> str | None:
        """A digest of the files that say what a local model is, as they were when first asked for, trained weights left
        out; empty for other names. None where code decides what the model is."""
        path = Path(self.model).expanduser()
        if ":" in self.model or self.trust_remote_code:
            return None
        if not path.exists():
            return ""
        digest = hashlib.sha256()
        try:
            for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
                digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
        except OSError:  # building the model reports it better
            return None
        return digest.hexdigest()

    @property
    def ranks(self) -> int:
        """How many ranks the model is sharded over."""
        return prod(map(int, re.findall(r"\d+", str(self.shard or 1))))

    def simulated_settings(self) -> dict[str, bool | str | int]:
        """Settings given here that only simulated hardware can follow, by their fields' names."""
        return {name: value for name in SIMULATED if (value := getattr(self, name))}

    def simulated_only(self) -> tuple[str, ...]:
        """The same as a user writes them, as lines of a job file."""
        return tuple(f"`{name}: {str(value).lower()}`" for name, value in self.simulated_settings().items())


def as_option(field: str) -> str:
    """What a user writes for a field of WorkloadSpec: an option, or a key of a job file."""
    return f"--{field.replace('_', '-')}" if field in OPTIONS else f"`{field}`"


def described_by(given: Mapping[str, Any], base: WorkloadSpec | None = None) -> WorkloadSpec:
    """The workload that settings describe, over those of ``base``, a plan's own.

    Raises UsageError where no model is named, and for a setting or a value that workloads do not have.
    """
    values = (base.model_dump() if base is not None else {}) | dict(given)
    if "model" not in values:
        raise UsageError(
            "no model was named",
            remedy='Name one: --model llama-8b, `model: llama-8b` in a --job file, model="llama-8b" in Python.',
        )
    try:
        return WorkloadSpec.model_validate(values)
    except ValidationError as error:
        name, why = first_violation(error)
        field = name.partition(".")[0]
        known, remedy = WorkloadSpec.model_fields, "docs/job.md says what each setting takes."
        if field not in known:
            remedy = f"{did_you_mean(field, known)}What describes a training step: {', '.join(known)} (docs/job.md)."
        raise UsageError(f"{as_option(field)} {values[field]}: {why}" if field else why, remedy=remedy) from None
