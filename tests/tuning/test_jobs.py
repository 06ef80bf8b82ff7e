"""What a smaller batch, shorter sequences or a leaner optimizer make of a job; a live one's own tensors stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autockpt.schema import WorkloadSpec
from autockpt.schema.remedy import FOUR_BITS, joined
from autockpt.tuning.jobs import Described, Live
from autockpt.workload import Step
from search_spaces.hardware import load_hardware

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


def test_a_cut_batch_holds_none_of_the_bytes_that_were_cut_off() -> None:
    ids = torch.zeros(ROWS, LENGTH)
    job = live(ids=ids, labels=ids)
    smaller, shorter, longest = job.smaller_batch(ROWS, 2), job.shorter(LENGTH, 8), job.shorter(LENGTH, LENGTH)
    assert smaller is not None and shorter is not None and longest is not None
    weights = job.step.resident_bytes() - ROWS * LENGTH * 4
    for cut, tokens in ((smaller, 2 * LENGTH), (shorter, ROWS * 8), (longest, ROWS * LENGTH)):
        assert cut.step.resident_bytes() == weights + tokens * 4
        assert cut.step.batch["ids"] is cut.step.batch["labels"]


def test_a_batch_whose_tensors_are_not_rows_is_not_cut() -> None:
    assert live(ids=torch.zeros(ROWS, LENGTH), patches=torch.zeros(100, 3)).smaller_batch(ROWS, 2) is None


def test_optimizers_with_fewer_states() -> None:
    job = live(ids=torch.zeros(ROWS, LENGTH))
    ((name, leaner),) = job.leaner_optimizers()
    assert name == "sgd" and isinstance(leaner.step.optimizer, torch.optim.SGD)
    assert isinstance(job.step.optimizer, torch.optim.AdamW) and not list(leaner.leaner_optimizers())
    described = Described(WorkloadSpec(model="llama-tiny"))
    assert [name for name, _ in described.leaner_optimizers()] == ["adamw_fused", "sgd"]
    simulated = Described(described.spec, load_hardware("h100"))
    assert [name for name, _ in simulated.leaner_optimizers()] == ["adamw_fused", "adamw8bit", "sgd"]


def test_adapters_then_a_base_in_4_bits_by_options() -> None:
    plain = Described(WorkloadSpec(model="llama-tiny"))
    assert [options for options, _, _ in plain.adapted(8)] == ["LoRA of rank 8", joined("LoRA of rank 8", FOUR_BITS)]
    lora = Described(WorkloadSpec(model="llama-tiny", lora=2))
    ((options, _, job),) = lora.adapted(8)
    assert options == FOUR_BITS and job.spec.lora == 2 and job.spec.load_in_4bit
    assert not list(Described(WorkloadSpec(model="llama-tiny", lora=2, load_in_8bit=True)).adapted(8))
