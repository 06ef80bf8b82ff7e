"""A plan, or a budget, in transformers' Trainer and everything derived from it (TRL's SFTTrainer): a callback."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import transformers
from torch import nn
from transformers import TrainerCallback

from autockpt.errors import ConflictError, UsageError
from autockpt.integrations.at_start import PlanCallback, found_once, refuse_search, say
from autockpt.schema.plan import Plan
from autockpt.workload import Step, ddp_of, move

_SPELLINGS = ("activation_checkpointing", "gradient_checkpointing")


class AutockptCallback(PlanCallback, TrainerCallback):
    """Applies a plan while a Trainer trains: one from a file, or one that it searches for as training starts.

        Trainer(model, args, callbacks=[autockpt.AutockptCallback("plan.yaml")], …).train()
        Trainer(model, args, callbacks=[autockpt.AutockptCallback(budget="24GB")], …).train()

    With ``budget`` (text, as for ``autockpt.search``) the search measures the Trainer's own model, loss, optimizer and
    batch size, with the longest rows of the data set, in the Trainer's process and before its first step. It takes at
    most about ``timeout`` seconds; by default ten minutes or a tenth of the predicted training time, whichever is
    shorter, but at least as long as the baselines take. The Trainer's own times and rates leave it out. The run is
    kept in ``out`` (default: ``autockpt`` in the output directory), where the next training finds the answer again.
    ``options`` go to the search: ``headroom``, ``host_budget``, ``trials``, …
    Weights, optimizer, random state and order of the data are afterwards what they were. Under DDP the first process
    searches and the others wait.

    With ``lengths`` ("auto": those of the data set; else as for ``autockpt.search``) the plan has sets of choices by
    the length of the batch.

    The plan is on the model until training ends; ``handle`` says what was attached, ``remove`` takes it off where
    training was interrupted. Evaluation, ``generate`` and saving in between see the model as it is without a plan.

    Raises UsageError unless exactly one of plan and budget is given, PlanError for a malformed plan, both at once;
    ConflictError when the Trainer is made or training begins and the Trainer's arguments ask for activation
    checkpointing of its own: one of the two must be switched off. Where these arguments have it on by default (TRL's),
    the plan replaces it, and a line reports that. Before the first step: UsageError where no search is
    possible in this trainer (FSDP, DeepSpeed, torch_compile), InfeasibleError where nothing fits the budget.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        take_over(args, kwargs["model"], aloud=state.is_world_process_zero)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        take_over(args, kwargs["model"], aloud=state.is_world_process_zero)
        self.remove()  # left from a run that was interrupted, or that is tried again with a smaller batch
        self.handle = None
        if self.plan is not None:
            self._apply(self.plan, kwargs["model"], aloud=state.is_world_process_zero)
        else:
            trainer = calling_trainer()
            _restore(trainer)
            _refuse_unsearchable(trainer)
            self._await_batches(trainer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is None:
            raise UsageError(
                "this trainer draws its batches in a way of its own, so no search could see them",
                remedy="Search first (autockpt search, or autockpt.search), and pass plan= to AutockptCallback.",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.remove()
        if self.plan is None:
            _restore(calling_trainer())

    def _await_batches(self, trainer: Any) -> None:
        """Search once the batches of the first step are there: drawn as ever, so the order of the data stays."""

        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            drawn = type(trainer).get_batch_samples(trainer, *args, **kwargs)
            batches, items = drawn
            if batches:
                del trainer.get_batch_samples
                found = self._find(trainer, lambda: _search(trainer, self.find_plan, batches[0], items))
                self._apply(found, trainer.model, aloud=trainer.state.is_world_process_zero)
            return drawn

        trainer.get_batch_samples = get_batch_samples

    def _find(self, trainer: Any, search: Callable[[], Plan]) -> Plan:
        """The plan that ``search`` finds, in the first process. The Trainer's bar, times and rates leave it out.

        They are counted from the beginning of its training, so ``log``, which gets all of them, shifts that by the
        search.
        """
        began = time.time()
        plan = found_once(search)
        searched, log = time.time() - began, trainer.log

        def log_without(logs: dict[str, Any], start_time: float | None = None) -> Any:
            took = logs.get("train_runtime", 0.0)
            if took > searched:  # the last one of a training: its figures are made already
                logs["train_runtime"] = round(took - searched, 4)
                for name in [n for n in logs if n.startswith("train_") and n.endswith("_per_second")]:
                    logs[name] = round(round(logs[name] * took) / (took - searched), 3)  # steps, samples: whole numbers
            return log(logs, *([] if start_time is None else [start_time + searched]))

        trainer.log = log_without
        bars = (getattr(callback, "training_bar", None) for callback in trainer.callback_handler.callbacks)
        for bar in filter(None, bars):
            bar.unpause()
        return plan


def calling_trainer() -> Any:
    """The Trainer whose event this is. Callbacks are not given it, and its loss is what has to be measured."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, transformers.Trainer):
            return caller
        frame = frame.f_back
    raise UsageError(
        "AutockptCallback(budget=…) was called by something else than a Trainer of transformers",
        remedy="Use autockpt.search(autockpt.Step(model, batch, …)) there, and autockpt.apply.",
    )


def _restore(trainer: Any) -> None:
    """The Trainer's own ``log`` again, where a search had replaced it."""
    vars(trainer).pop("log", None)


def _refuse_unsearchable(trainer: Any) -> None:
    """Raise UsageError for trainers whose step cannot be taken by one process, or not again with the same batch."""
    accelerator, args = trainer.accelerator, trainer.args
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    parallel = getattr(accelerator, "parallelism_config", None)
    optim = str(getattr(args.optim, "value", args.optim))
    code = getattr(inspect.unwrap(type(trainer).training_step), "__code__", None)
    step = {*(code.co_names if code is not None else ())}
    makes_batches = type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs
    reasons = {
        "DeepSpeed": "DEEPSPEED" in kind,
        "FSDP": "FSDP" in kind or bool(getattr(trainer, "is_fsdp_enabled", False)),
        "torch_compile=True": args.torch_compile,
        "DataParallel over several GPUs": args.n_gpu > 1,
        f"distributed training of kind {kind}": kind not in ("NO", "MULTI_GPU", "MULTI_CPU"),
        "tensor, context or sequence parallelism": parallel is not None and getattr(parallel, "total_size", 1) > 1,
        f"optim={optim}": "layerwise" in optim or "lomo" in optim,
        f"{type(trainer).__name__}, which makes its batches while it trains": makes_batches,
        f"{type(trainer).__name__}, whose training step is its own and not that of compute_loss": "backward" in step
        and step.isdisjoint(("compute_loss", "training_step")),  # the latter: its base's, as in TRL's SFTTrainer
    }
    ways = ["with --compile layers"] * args.torch_compile + ["GRPO and RLOO: with `grpo_prompt_len: N` in a --job file"]
    refuse_search("AutockptCallback", reasons, *ways[: args.torch_compile or makes_batches])


def _search(trainer: Any, find: Callable[..., Plan], first: Any, items: Any) -> Plan:
    """Search with the Trainer's own model, loss and optimizer; nothing of it is another afterwards.

    ``first`` is the batch that training begins with, ``items`` are the labels in an update of it.
    """
    args, model, optimizer = trainer.args, trainer.model, trainer.optimizer
    loader, processes = trainer.callback_handler.train_dataloader, trainer.accelerator.num_processes
    with _unchanged(trainer) as records:

        def step(batch: Any) -> Step:
            def loss(model: nn.Module, batch: Any) -> Any:
                return trainer.compute_loss(model, dict(batch), num_items_in_batch=items)  # which may change its dict

            return Step(
                model,
                move(dict(batch), args.device),
                loss=loss,
                optimizer=getattr(optimizer, "optimizer", optimizer),
                scaler=trainer.accelerator.scaler,
                accumulate=args.gradient_accumulation_steps,
                max_grad_norm=args.max_grad_norm or None,
                snapshot=(records,),
                settings=_facts(trainer),
            )

        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        model.train()
        if callable(prepare := getattr(optimizer, "train", None)):
            prepare()
        return find(
            step,
            first,
            rows=trainer.state.train_batch_size,
            steps=trainer.state.max_steps - trainer.state.global_step,
            processes=processes,
            dataset=loader.dataset,
            collate=loader.collate_fn,
            folder=Path(args.output_dir) / "autockpt",
        )


def _facts(trainer: Any) -> dict[str, Any]:
    """What else the answer depends on: whose loss it is, and how it is computed."""
    args = trainer.args
    return {
        "trainer": type(trainer).__name__,
        "loss": getattr(args, "loss_type", None),
        "label_smoothing": args.label_smoothing_factor,
        "autocast": None if (precision := trainer.accelerator.mixed_precision) == "no" else precision,
        "processes": trainer.accelerator.num_processes,
        "ddp": ddp_of(trainer.model_wrapped),
    }


@contextmanager
def _unchanged(trainer: Any) -> Iterator[dict[str, Any]]:
    """The Trainer's own records (metrics, counts of tokens) are restored, and it asks no other process for theirs.

    Gives the records that hold more: what a search has to restore itself.
    """
    data = (trainer.train_dataset, trainer.eval_dataset)
    alone: Any = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), lambda tensor, *args, **kwargs: tensor)
    with patch.dict(vars(trainer)), patch.multiple(trainer.accelerator, **alone):
        yield {n: v for n, v in vars(trainer).items() if isinstance(v, (dict, list)) and not any(v is d for d in data)}


def take_over(args: Any, model: Any, *, aloud: bool) -> None:
    """Switch the trainer's activation checkpointing off where its class of arguments has it on by default.

    That is how TRL's are: that it is on says nothing of what the user wants, and the plan replaces it. Raises
    ConflictError where it was asked for.
    """
    on = [name for name in _SPELLINGS if getattr(args, name, False)]
    if on and any(field.name in _SPELLINGS and field.default is True for field in fields(args)):
        for name in on:
            setattr(args, name, False)
        if any(vars(module).get(name) is True for module in model.modules() for name in _SPELLINGS):
            # train() switches it on before this callback runs, where that was added to a trainer made before
            next(getattr(model, f"{name}_disable") for name in _SPELLINGS if hasattr(model, f"{name}_disable"))()
        if aloud:
            say(f"{on[0]} of {type(args).__name__}, on by default there, is switched off: the plan replaces it")
    _refuse_own_checkpointing(args)


def _refuse_own_checkpointing(args: Any) -> None:
    """Raise ConflictError where training arguments ask for activation checkpointing or offloading on top of the plan's.

    The Trainer mirrors one spelling in the other, so which of them was written is not known. FSDP has a switch too.
    """
    spelt = [name for name in _SPELLINGS if getattr(args, name, False)]
    asked = [f"{' or '.join(spelt)}=True"] * bool(spelt)
    off = [f"{name}=False" for name in spelt[:1]]
    if getattr(args, "activation_offloading", False):
        asked.append("activation_offloading=True")
        off.append("activation_offloading=False")
    fsdp = getattr(args, "fsdp_config", None)
    if isinstance(fsdp, Mapping) and str(fsdp.get(_SPELLINGS[0])).lower() in ("true", "1", "yes"):
        asked.append(f"{_SPELLINGS[0]} in fsdp_config")
        off.append(f"fsdp_config without {_SPELLINGS[0]}")
    if not asked:
        return
    raise ConflictError(
        f"{type(args).__name__} has {' and '.join(asked)}, and AutockptCallback is to apply a plan: a layer can "
        "follow only one of them",
        remedy=f"The plan wins where the arguments leave activations alone: pass {' and '.join(off)} to "
        f"{type(args).__name__}(…). To train with the Trainer's own instead, leave AutockptCallback out.",
    )
