"""A budget instead of a plan: the search as training starts leaves what a run with the plan it found leaves."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autockpt.errors import InfeasibleError, PlanError, UsageError
from autockpt.integrations.transformers import AutockptCallback
from autockpt.schema import Plan
from tests.errors import raises
from tests.integrations.runs import untouched
from tests.integrations.test_transformers import LLAMA, ROWS, accelerate, sft, trainer, weights
from tests.policies.zoo import assert_equal
from tests.runtime.processes import in_processes, needs_gloo

SHORT: dict[str, Any] = {"budget": "60%act", "trials": 1, "choices": ("save", "recompute")}
LOGGED = {"logging_strategy": "steps", "logging_steps": 1}


class Trace(transformers.TrainerCallback):
    """What training left behind, step by step: losses, learning rates, and in the end all random states."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.random: Tensor | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append({k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.random = torch.get_rng_state()


class Noisy:
    """A collator that draws random numbers, and notes which rows it was given when."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([r["input_ids"] for r in rows])
        self.order.append(int(ids.sum()))
        replaced = torch.rand(ids.shape) < 0.2
        return {"input_ids": ids.masked_fill(replaced, 1), "labels": ids}


def train(run: Any) -> tuple[dict[str, Tensor], Trace]:
    trace = Trace()
    run.add_callback(trace)
    run.train()
    assert untouched(run.model)
    return weights(run.model), trace


def same(a: tuple[dict[str, Tensor], Trace], b: tuple[dict[str, Tensor], Trace]) -> None:
    assert_equal(a[0], b[0])
    assert a[1].logged == b[1].logged and len(a[1].logged) > 3
    assert torch.equal(a[1].random, b[1].random)


def found_plan(folder: Path) -> Path:
    (plan,) = folder.glob("autockpt/*/plan.yaml")
    return plan


@pytest.mark.slow
def test_the_trainer_leaves_the_same_as_with_the_plan(tmp_path, capfd):
    """Dropout in the adapters, smoothed labels, accumulation, bf16, random batches; then the answer is found again."""
    peft = pytest.importorskip("peft")

    def make(folder: str, callback: AutockptCallback) -> tuple[Any, Noisy]:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear")
        more = {"gradient_accumulation_steps": 2, "bf16": True, "label_smoothing_factor": 0.1} | LOGGED
        run = trainer(tmp_path / folder, peft.get_peft_model(LLAMA.make(), config), [callback], **more)
        run.data_collator = collator = Noisy()
        return run, collator

    searched, order = make("found", AutockptCallback(**SHORT))
    found = train(searched)
    said = capfd.readouterr().out
    assert "the plan was found in" in said and f"autockpt history {tmp_path / 'found' / 'autockpt'}" in said
    (line,) = [line for line in said.splitlines() if "applied plan" in line]
    assert "of the budget free" in line and "recomputing everything" in line
    assert said.count("autockpt: ") <= 6, said
    planned, _ = make("planned", AutockptCallback(found_plan(tmp_path / "found")))
    same(found, train(planned))
    again, known = make("found", AutockptCallback(**SHORT))
    same(found, train(again))
    said = capfd.readouterr().out
    assert "known from an earlier run" in said
    assert known.order == order.order


@pytest.mark.slow
def test_the_trainers_own_times_leave_the_search_out(tmp_path, monkeypatch):
    late, clock, ended = [0.0], time.time, list[float]()

    def search(*args: Any, **kwargs: Any) -> Plan:
        late[0] += 500.0
        ended.append(clock())
        return Plan(choices={"model.layers.0": "recompute"}, settings={"batch_size": 2, "accumulate": 1})

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            bars = (getattr(c, "training_bar", None) for c in run.callback_handler.callbacks)
            (self.bar,) = filter(None, bars)
            self.began = self.bar.start_t

    monkeypatch.setattr("autockpt.integrations.transformers._search", search)
    monkeypatch.setattr(time, "time", lambda: clock() + late[0])
    log = LOGGED | {"disable_tqdm": False, "include_num_input_tokens_seen": True}
    run = trainer(tmp_path, LLAMA.make(), [AutockptCallback(budget="24GB"), watch := Watch()], **log)
    metrics = run.train().metrics
    assert len(ended) == 1 and watch.began >= ended[0]
    for times in (metrics, run.state.log_history[-1]):
        assert 0 < times["train_runtime"] < 250
        assert times["train_samples_per_second"] * times["train_runtime"] == pytest.approx(8, rel=0.1)
        assert times["train_steps_per_second"] * times["train_runtime"] == pytest.approx(4, rel=0.1)
    assert all(logs.get("train_runtime", 0) < 250 for logs in run.state.log_history)
    assert "log" not in vars(run)


@pytest.mark.slow
def test_a_plan_for_all_lengths_trains_as_without(tmp_path, capfd):
    """Rows of 13 to 64 tokens, of which the longest do not fit with everything saved; labels end where rows do."""
    ragged = [{name: v[: 64 if n % 5 == 0 else 12 + n] for name, v in row.items()} for n, row in enumerate(ROWS)]

    def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        fill = {"input_ids": 0, "labels": -100}
        return {n: nn.utils.rnn.pad_sequence([r[n] for r in rows], True, padding_value=v) for n, v in fill.items()}

    def make(folder: str, callbacks: list[Any]) -> Any:
        run = trainer(tmp_path / folder, LLAMA.make(), callbacks, max_steps=8, **LOGGED)
        run.train_dataset, run.data_collator = ragged, padded
        return run

    callback = AutockptCallback(**SHORT | {"budget": "1500KB", "lengths": "auto"})
    found = train(make("found", [callback]))
    said = capfd.readouterr().out
    assert "lengths: 6 rows of 13 to 64 tokens" in said and "padded to 64 tokens" in said
    assert "Over 6 rows" in said or "One set of choices" in said
    assert callback.handle is not None and any("recompute" in how for how in callback.handle.attached.values())
    same(found, train(make("plain", [])))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sft_on_texts_leaves_the_same_as_with_the_plan(tmp_path, capfd):
    """TRL's own loss and metrics; the longest texts are planned for, whichever batch comes first."""
    found = train(sft(tmp_path / "found", [AutockptCallback(**SHORT)], **LOGGED))
    assert "planning for the 2 longest rows" in capfd.readouterr().out
    planned = train(sft(tmp_path / "planned", [AutockptCallback(found_plan(tmp_path / "found"))], **LOGGED))
    same(found, planned)
    assert all("mean_token_accuracy" in logs for logs in found[1].logged[:-1])


@pytest.mark.slow
def test_where_nothing_fits_it_stops_before_the_first_step(tmp_path):
    class OneWay(torch.utils.data.IterableDataset):
        """Rows that come once."""

        rows = iter(ROWS)

        def __iter__(self) -> Any:
            return self.rows

    model = LLAMA.make()
    run = trainer(tmp_path, model, [AutockptCallback(**SHORT | {"budget": "1100KB"})])
    run.train_dataset = OneWay()
    before = weights(model)
    with pytest.raises(InfeasibleError) as caught:
        run.train()
    assert caught.value.code == "budget.infeasible" and (caught.value.smallest_peak or 0) > 1_100_000
    remedy = caught.value.remedy
    assert "batch size 1, accumulate 2" in remedy and "--" not in remedy, remedy
    assert all(way.peak_bytes + way.spare_bytes == 1_100_000 for way in caught.value.alternatives)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert run.state.global_step == 0 and untouched(model) and not run.optimizer.state
    assert_equal(weights(model), before)
    assert next(OneWay.rows)["input_ids"].equal(ROWS[4]["input_ids"])  # a batch of two, and one drawn ahead


def _train_twice(rank: int, folder: str, port: int) -> None:
    """In one of two training processes: with a budget, then with the plan that was found for both."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ended = []
    for way in ("budget", "plan"):
        options = SHORT if way == "budget" else {"plan": found_plan(Path(folder, "budget"))}
        run = trainer(Path(folder, way), LLAMA.make(), [AutockptCallback(**options)], ddp_backend="gloo", **LOGGED)
        run.train()
        ended.append(weights(run.model))
    assert_equal(*ended)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo and autograd sometimes abort an interpreter that shuts down


@pytest.mark.slow
@needs_gloo
def test_under_ddp_the_first_process_searches_for_all(tmp_path, capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_processes(_train_twice, (str(tmp_path), port), 2)
    assert capfd.readouterr().out.count("the plan was found in") == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "budget="),
        ({"plan": "plan.yaml", "budget": "24GB"}, "budget="),
        ({"budget": "lots"}, "lots"),
        ({"budget": "24GB", "timeout": 0}, "timeout=0"),
        ({"budget": "24GB", "trials": "x"}, "trials='x'"),
        ({"budget": "24GB", "tirals": 3}, "tirals"),
        ({"budget": "24GB", "global_batch": 8}, "global_batch"),
        ({"budget": "60%", "lengths": "auto"}, "60%"),
        ({"plan": "plan.yaml", "lengths": "auto"}, "lengths"),
        ({"budget": "24GB", "lengths": "missing.txt"}, "missing.txt"),
        ({"budget": "24GB", "lengths": [8, -3]}, "lengths=[8, -3]"),
    ],
)
def test_what_is_asked_wrongly_is_an_error_at_once(options, named):
    with raises(UsageError, named):
        AutockptCallback(**options)
    with pytest.raises(PlanError):
        AutockptCallback("missing.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: setattr(run, "is_fsdp_enabled", True), "FSDP"),
        (lambda run: _kind(run, accelerate.DistributedType.DEEPSPEED), "DeepSpeed"),
        (lambda run: setattr(run.args, "torch_compile", True), "torch_compile=True"),
        (lambda run: setattr(run.args, "optim", "galore_adamw_layerwise"), "optim=galore_adamw_layerwise"),
        (lambda run: _steps_by(run, _own_step), "Stepping, whose training step is its own"),
    ],
    ids=["fsdp", "deepspeed", "compile", "layerwise", "own step"],
)
def test_where_it_cannot_search_it_says_so_and_what_to_do(tmp_path, change: Callable[[Any], None], said: str):
    run = trainer(tmp_path, LLAMA.make(), [])
    change(run)
    with raises(UsageError, said, "plan.yaml"):
        _begin(run)


def test_a_training_step_around_the_trainers_own_can_be_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(AutockptCallback, "_await_batches", lambda *args: None)
    run = trainer(tmp_path, LLAMA.make(), [])
    inner = type(run).training_step
    for step in (
        lambda self, *given, **more: type(self).training_step(self, *given, **more),
        lambda *given: inner(*given),
    ):
        _steps_by(run, step)
        _begin(run)


def _steps_by(run: Any, step: Callable[..., Any]) -> None:
    run.__class__ = type("Stepping", (type(run),), {"training_step": step})


def _own_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    loss = model(**inputs).loss
    self.accelerator.backward(loss)
    return loss.detach()


def _kind(run: Any, kind: Any) -> None:
    run.accelerator = SimpleNamespace(distributed_type=kind)


def _begin(self: Any) -> None:
    """As a Trainer does it, whose name for itself is ``self``."""
    AutockptCallback(budget="24GB").on_train_begin(self.args, self.state, self.control, model=self.model)
