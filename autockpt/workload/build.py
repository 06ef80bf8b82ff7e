"""Build the Step that a WorkloadSpec describes, in any process."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload.batches import BatchMaker
from autockpt.workload.configs import TEXT, ConfigSource, ModelClass, class_to_train, find_config, prepare, quiet
from autockpt.workload.factory import asked_length, call_factory, is_factory
from autockpt.workload.failures import is_out_of_memory, needed, summary
from autockpt.workload.fastinit import fast_init
from autockpt.workload.grpo import NOTE as GRPO_NOTE
from autockpt.workload.grpo import policy_loss, score_completions, with_prompts
from autockpt.workload.lora import adapt, rank_of
from autockpt.workload.quantised import build_quantised, quantization_facts, quantization_of, with_own_quantization
from autockpt.workload.sharding import TENSOR_PARALLEL, in_a_group, shard_model
from autockpt.workload.stage import cut
from autockpt.workload.step import DTYPES, Step, short_dtype
from autockpt.workload.storages import move

_DEFAULT_ROWS = 4
_DEFAULT_LENGTH = 1024
# The first scale is too large for fp16 more often than not, and a step that overflows is skipped whole.
_FIRST_SCALE = 1024.0
_ADAFACTORS_RATE = 1e-3


def build(spec: WorkloadSpec, device: torch.device | str = "cpu") -> Step:
    """Build the workload that a spec describes: model with random weights, batch, optimizer.

    Deterministic: sets PyTorch's global seed from the spec. Creates tensors only by PyTorch's ordinary functions, so
    that it can run while a dispatch mode keeps them from taking memory. ``shard`` takes a process group. Raises
    WorkloadError or UsageError with a remedy; running out of memory is passed on as it is.
    """
    device = torch.device(device)
    _check(spec)
    torch.manual_seed(spec.seed)
    with quiet():
        return _from_factory(spec, device) if is_factory(spec.model) else _from_config(spec, device)


def preload(spec: WorkloadSpec) -> None:
    """Import what building the workload of ``spec`` takes of transformers, for processes that are forked later.

    Nothing of the user's is run, and what cannot be imported is left for ``build`` to complain about.
    """
    if spec.shard is not None:
        importlib.import_module("torch.distributed.fsdp")
    if is_factory(spec.model) or spec.trust_remote_code:
        return
    with suppress(Exception), quiet():
        source = find_config(spec)
        load_class(class_to_train(source))


def refuse_simulated(spec: WorkloadSpec) -> None:
    """Raise UsageError for a spec that no real step of one process can follow: several GPUs, or states by rule."""
    for line in spec.simulated_only():
        raise UsageError(
            f"{line} can only be planned for on simulated hardware, not measured in one process",
            remedy="Add --hardware with the name of a device; or leave this key out, or the plan that --resume found "
            "it in. `shard` and `ddp` are measured under torchrun: torchrun --nproc-per-node N -m autockpt search …",
        )


def _check(spec: WorkloadSpec) -> None:
    refuse_simulated(spec.model_copy(update={"shard": None, "ddp": None}) if in_a_group() else spec)
    if spec.scaler and spec.dtype == "fp16":
        raise UsageError(
            "a gradient scaler cannot unscale gradients that are fp16 themselves",
            remedy="Keep the weights in fp32 and use --autocast fp16.",
        )
    if spec.scaler and spec.optimizer == "none":
        raise UsageError("a gradient scaler needs an optimizer", remedy="Leave one of the two options out.")
    sharded_tensors = str(spec.shard).startswith(TENSOR_PARALLEL)
    if sharded_tensors and spec.max_grad_norm is not None:
        raise UsageError(
            "PyTorch clips no gradients of which some are divided by tensor parallelism and others whole",
            remedy="Leave out `max_grad_norm`, which changes no peak.",
        )
    if spec.grpo_prompt_len is not None and (spec.stage is not None or is_factory(spec.model) or sharded_tensors):
        raise UsageError(
            "`grpo_prompt_len` describes the step of a whole model of transformers, by its configuration",
            remedy="Leave it out with `stage`, tensor parallelism and functions of your own.",
        )


def _from_config(spec: WorkloadSpec, device: torch.device) -> Step:
    source = find_config(spec)
    spec = with_own_quantization(spec, source)
    trained = class_to_train(source, own_code=spec.trust_remote_code)
    rows, length, note = _size(spec, source, trained)
    notes = [trained.note, note, *prepare(source, trained.task, length)]
    dtype = DTYPES[_dtype_name(spec, source)]
    # on the host where it is shared: no GPU has room for the whole
    model = make_model(spec, source, trained, dtype, device if spec.shard is None else torch.device("cpu"))
    if spec.liger:
        apply_liger(model)
    prompt = spec.grpo_prompt_len and min(spec.grpo_prompt_len, (length or 1) - 1)
    if prompt is not None:
        if trained.task != "causal_lm":
            raise UsageError(
                f"`grpo_prompt_len` is for causal language models, not {trained.name}", remedy="Leave it out."
            )
        score_completions(model, prompt)
        notes.append(GRPO_NOTE)
    model, adapted = adapt(model, spec)
    notes += adapted
    numbers = torch.Generator().manual_seed(spec.seed)
    maker = BatchMaker(config=source.config, rows=rows, length=length or 1, packed=spec.packed, generator=numbers)
    batch = move(maker.make(trained.task, torch.float32 if spec.autocast else dtype), device)
    parts: dict[str, Any] = {}
    if prompt is not None:
        batch, parts = with_prompts(batch, prompt), {"loss": policy_loss}
    elif spec.stage is not None:
        if str(spec.shard).startswith(TENSOR_PARALLEL):  # its plan is for the whole model
            model = shard_model(model, spec, None, device)
        batch, parts = cut(model, batch, spec)
    workload = _assemble(spec, model, batch, device, **parts)
    workload.notes += tuple(note for note in notes if note)
    workload.settings |= {
        "model": source.where,
        "architecture": trained.name,
        "batch_size": rows,
        "seq_len": length,
        "lora": rank_of(model),
        "quantization": quantization_facts(model),
        "liger": spec.liger,
    } | ({} if spec.stage is None else {"stage": spec.stage})
    return workload


def _size(spec: WorkloadSpec, source: ConfigSource, trained: ModelClass) -> tuple[int, int | None, str]:
    """Rows, the longest sequence (None for images) and a note: as asked, else the shape's, else usual ones."""
    defaults = source.defaults
    rows = spec.batch_size or (defaults.batch_size if defaults else _DEFAULT_ROWS)
    if trained.task not in TEXT:
        return rows, None, "--seq-len is ignored: images have the size that the model takes." if spec.seq_len else ""
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    usual = min(limit, _DEFAULT_LENGTH) if isinstance(limit, int) and limit > 0 else _DEFAULT_LENGTH
    length = spec.seq_len or (defaults.seq_len if defaults else None) or usual
    return (
        rows,
        length,
        "A single sequence needs no padding: same as --packed." if rows == 1 and not spec.packed else "",
    )


def _dtype_name(spec: WorkloadSpec, source: ConfigSource) -> str:
    if spec.dtype is not None or source.defaults is not None:
        return spec.dtype or source.defaults.dtype  # type: ignore[union-attr]
    own = getattr(source.config, "dtype", None)
    name = short_dtype(own) if isinstance(own, torch.dtype) else "fp32"
    return name if name in DTYPES else "fp32"


def _from_factory(spec: WorkloadSpec, device: torch.device) -> Step:
    made = call_factory(spec)
    if isinstance(made, Step):
        model = shard_model(made.model, spec, made.optimizer, device)
        workload = replace(made, model=model, spec=spec, units=spec.units or made.units)
    else:
        model, batch, loss = made
        if spec.liger:
            apply_liger(model)
        model, notes = adapt(model, spec)
        workload = _assemble(spec, model, batch, device, loss=loss)
        workload.notes += tuple(notes)
        workload.settings |= {"lora": rank_of(model), "quantization": quantization_facts(model)}
    workload.settings["model"] = spec.model
    # a batch without token ids does not tell how long its sequences are, and other lengths can be asked for
    if workload.settings["seq_len"] is None and (length := asked_length(spec)) is not None:
        workload.settings["asked_seq_len"] = length
    return workload


def _assemble(spec: WorkloadSpec, model: nn.Module, batch: Any, device: torch.device, **parts: Any) -> Step:
    """A Step of model and batch on the device, and of what else the spec says; ``parts`` are further fields of it."""
    model = shard_model(model, spec, device=device)
    _move_model(model, device)
    return Step(
        model,
        move(batch, device),
        optimizer=make_optimizer(spec.optimizer, model),
        scaler=torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE) if spec.scaler else None,
        accumulate=spec.accumulate,
        max_grad_norm=spec.max_grad_norm,
        autocast=spec.autocast,
        units=spec.units,
        spec=spec,
        **parts,
    )


def _move_model(model: nn.Module, device: torch.device) -> None:
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        try:
            model.to(device)
        except (ValueError, NotImplementedError) as error:  # quantised models refuse to be moved
            raise WorkloadError(
                f"the model cannot be moved to {device}: {error}", remedy="Make it on that device in the function."
            ) from None


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """The named optimizer over the trainable parameters; None for ``none``.

    PyTorch's, with its own defaults; ``adafactor`` is transformers', as its Trainer makes it. Under tensor parallelism
    sharded and whole parameters are groups of their own, as no kernel takes both.
    """
    trainable: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if len(kinds := dict.fromkeys(map(type, trainable))) > 1:
        trainable = [{"params": [p for p in trainable if type(p) is kind]} for kind in kinds]
    if name == "none":
        return None
    if not trainable:
        raise WorkloadError(
            "no parameter of the model requires gradients, so there is nothing to optimize",
            remedy="Check the function that made it.",
        )
    if name == "adamw8bit":
        return _eight_bit(trainable)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trainable, lr=_ADAFACTORS_RATE, scale_parameter=False, relative_step=False)
    if name == "sgd":
        return torch.optim.SGD(trainable)
    return torch.optim.AdamW(trainable, fused=True if name == "adamw_fused" else None)


def _eight_bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW8bit, which runs on CUDA alone."""
    remedy = "Use --hardware with the name of a device to plan without one, or another --optimizer."
    if parameters[0].device.type != "cuda":
        raise UsageError("the optimizer adamw8bit runs on CUDA only", remedy=remedy)
    missing = "the optimizer adamw8bit is bitsandbytes', which is not installed"
    with needed(missing, f"pip install bitsandbytes. {remedy}"):
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(parameters)


def make_model(
    spec: WorkloadSpec, source: ConfigSource, trained: ModelClass, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The model on ``device`` in training mode, with random weights: bytes and seconds do not depend on their values.

    Raises WorkloadError for an attention implementation that is not there, and whatever else transformers refuses;
    running out of memory is passed on.
    """
    quantization = quantization_of(spec, DTYPES[spec.autocast] if spec.autocast is not None else dtype)
    if trained.remote and quantization is not None:
        raise WorkloadError(
            f"{source.where} is built by code of its own, which is not quantised without its weights",
            remedy="Make the model in a function of your own.",
        )
    try:
        cls, config = load_class(trained), source.config
        options: dict[str, Any] = {"dtype": dtype} | ({} if spec.attn is None else {"attn_implementation": spec.attn})
        if quantization is not None:
            return build_quantised(cls, config, options, quantization, device).train()
        code = {"trust_remote_code": True} if trained.remote else {}
        with torch.device(device), fast_init():
            return (cls.from_config if trained.remote else cls._from_config)(config, **options, **code).train()
    except Exception as error:
        if isinstance(error, WorkloadError) or is_out_of_memory(error):
            raise
        raise WorkloadError(
            f"transformers cannot build {source.where}: {summary(error)}",
            remedy="Correct the configuration, or write a function that returns (model, batch).",
        ) from None


def load_class(trained: ModelClass) -> Any:
    """transformers' class of this name, or the Auto class for remote code. Imports the module that it is in."""
    import transformers

    return getattr(transformers, trained.auto if trained.remote else trained.name)


def apply_liger(model: nn.Module) -> None:
    """What ``TrainingArguments(use_liger_kernel=True)`` does: fused loss, norms, activations and rotary embeddings.

    Liger Kernel (Hsu et al. 2024, arXiv:2410.10989) puts its kernels in place of a transformers model's own parts.
    Raises UsageError where the package is missing or has no kernels for this type of model.
    """
    what = "`liger` needs the packages liger-kernel and triton, though no GPU"
    with needed(what, "Install them: pip install liger-kernel triton"), _disable_current_modes():
        import liger_kernel.transformers.monkey_patch as liger  # type: ignore[import-not-found]
        from transformers.integrations.liger import apply_liger_kernel
    kind: Any = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(
            f"Liger Kernel has no kernels for {kind}", remedy="Leave `liger` out; transformers then trains without it."
        )
    apply_liger_kernel(model, None)


def refuse_liger_on(spec: WorkloadSpec, device: torch.device) -> None:
    """Raise UsageError where its kernels do not run."""
    if spec.liger and device.type == "cpu":
        raise UsageError(
            "Liger Kernel runs on accelerators alone",
            remedy="Simulate it for a card with --hardware, or leave `liger` out.",
        )
