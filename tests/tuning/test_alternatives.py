"""What a smaller batch, shorter sequences or a leaner optimizer make of a job; a live one's own tensors stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec
from autockpt.schema.outlook import FOUR_BITS, batch, joined
from autockpt.tuning import infeasible, search_request
from autockpt.tuning.infeasible import Change
from autockpt.workload import Step
from tests.errors import raises

ROWS, LENGTH = 4, 16


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of these tests are short."""
    monkeypatch.setattr(infeasible, "SHORTEST", LENGTH // 2)


def job(**more: Any) -> Change:
    return Change(search_request(budget="1GB", **more))


def described(**spec: Any) -> Change:
    return job(workload=WorkloadSpec(**{"model": "llama-tiny"} | spec))


def live(**batch: Any) -> Change:
    model = nn.Linear(3, 3)
    step = Step(model, batch, loss=lambda m, b: m(b).sum(), optimizer=torch.optim.AdamW(model.parameters()))
    return job(step=step)


def ids_of() -> torch.Tensor:
    return torch.zeros(ROWS, LENGTH, dtype=torch.long)


def shapes(change: Change) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in change.job.step.batch.items()}


def test_a_live_batch_is_cut_by_rows_and_by_length() -> None:
    ids, mask, scale = ids_of(), torch.zeros(ROWS, 1, LENGTH, LENGTH), torch.tensor(1.0)
    long = live(input_ids=ids, mask=mask, scale=scale, pixels=torch.zeros(ROWS, 3, LENGTH))
    smaller, _ = infeasible._smaller_batches(long, ROWS)
    assert shapes(smaller) == {"input_ids": (2, 16), "mask": (2, 1, 16, 16), "scale": (), "pixels": (2, 3, 16)}
    assert smaller.job.step.accumulate == 2 and smaller.job.step.settings["batch_size"] == 2
    assert smaller.options == batch(2, 2)
    (shorter,) = infeasible._shorter_sequences(long, LENGTH)
    assert shapes(shorter)["mask"] == (ROWS, 1, 8, 8) and shapes(shorter)["pixels"] == (ROWS, 3, LENGTH)
    assert long.job.step.batch["input_ids"] is ids and ids.shape == (ROWS, LENGTH)


def test_a_batch_whose_tensors_are_not_rows_is_not_cut() -> None:
    odd = live(ids=torch.zeros(ROWS, LENGTH), patches=torch.zeros(100, 3))
    with raises(UsageError):
        list(infeasible._smaller_batches(odd, ROWS))


def test_optimizers_with_fewer_states() -> None:
    trained = live(ids=torch.zeros(ROWS, LENGTH))
    (leaner,) = infeasible._lean_optimizers(trained)
    assert leaner.options == "optimizer sgd" and isinstance(leaner.job.step.optimizer, torch.optim.SGD)
    assert isinstance(trained.job.step.optimizer, torch.optim.AdamW)
    assert not list(infeasible._lean_optimizers(leaner))
    names = [change.options for change in infeasible._lean_optimizers(described())]
    assert names == ["optimizer adamw_fused", "optimizer sgd"]
    simulated = job(workload=WorkloadSpec(model="llama-tiny"), hardware="h100")
    names = [change.options.split()[1] for change in infeasible._lean_optimizers(simulated)]
    assert names == ["adamw_fused", "adamw8bit", "sgd"]


def test_adapters_then_a_base_in_4_bits_by_options() -> None:
    rank = "LoRA of rank 16"
    assert [change.options for change in infeasible._with_adapters(described())] == [rank, joined(rank, FOUR_BITS)]
    (change,) = infeasible._with_adapters(described(lora=2))
    assert change.options == FOUR_BITS and change.job.described.lora == 2 and change.job.described.load_in_4bit
    assert not list(infeasible._with_adapters(described(lora=2, quantization={"load_in_8bit": True})))
    assert not list(infeasible._with_adapters(live(ids=torch.zeros(ROWS, LENGTH)))), "a model at hand stays"
