"""What a smaller batch, shorter sequences or a leaner optimizer make of a job; a live one's own tensors stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autockpt.schema import WorkloadSpec
from autockpt.tuning.jobs import Described, Live
from autockpt.workload import Step

ROWS, LENGTH = 4, 16


def live(**batch: Any) -> Live:
    model = nn.Linear(3, 3)
    return Live(Step(model, batch, loss=lambda m, b: m(b).sum(), optimizer=torch.optim.AdamW(model.parameters())))


def shapes(job: Live | None) -> dict[str, tuple[int, ...]]:
    assert job is not None
    return {name: tuple(tensor.shape) for name, tensor in job.step.batch.items()}


def test_a_live_batch_is_cut_by_rows_and_by_length() -> None:
    ids, mask, scale = torch.zeros(ROWS, LENGTH), torch.zeros(ROWS, 1, LENGTH, LENGTH), torch.tensor(1.0)
    job = live(ids=ids, mask=mask, scale=scale, pixels=torch.zeros(ROWS, 3, LENGTH))
    smaller = job.smaller_batch(ROWS, 2)
    assert shapes(smaller) == {"ids": (2, 16), "mask": (2, 1, 16, 16), "scale": (), "pixels": (2, 3, 16)}
    assert smaller is not None and smaller.accumulate == 2 and smaller.step.settings["batch_size"] == 2
    assert shapes(job.shorter(LENGTH, 8))["mask"] == (ROWS, 1, 8, 8)
    assert shapes(job.shorter(LENGTH, 8))["pixels"] == (ROWS, 3, LENGTH)
    assert job.step.batch["ids"] is ids and ids.shape == (ROWS, LENGTH)


def test_a_batch_whose_tensors_are_not_rows_is_not_cut() -> None:
    assert live(ids=torch.zeros(ROWS, LENGTH), patches=torch.zeros(100, 3)).smaller_batch(ROWS, 2) is None


def test_optimizers_with_fewer_states() -> None:
    job = live(ids=torch.zeros(ROWS, LENGTH))
    ((name, leaner),) = job.leaner_optimizers()
    assert name == "sgd" and isinstance(leaner.step.optimizer, torch.optim.SGD)
    assert isinstance(job.step.optimizer, torch.optim.AdamW) and not list(leaner.leaner_optimizers())
    described = Described(WorkloadSpec(model="llama-tiny"))
    assert [name for name, _ in described.leaner_optimizers()] == ["sgd"]  # 8 bits where a card is simulated
