"""What a smaller batch, shorter sequences or a leaner optimizer make of a job; a live one's own tensors stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autockpt.errors import InfeasibleError
from autockpt.schema import WorkloadSpec
from autockpt.schema.remedy import FOUR_BITS, joined
from autockpt.tuning import run_search, search_request
from autockpt.tuning.jobs import Described, Live
from autockpt.workload import Step, build
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


@pytest.mark.slow
def test_adapters_on_a_live_model_leave_it_as_it_is() -> None:
    pytest.importorskip("peft")
    model = build(WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=16)).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    ids = torch.zeros(2, 16, dtype=torch.long)
    state, names = torch.get_rng_state(), [name for name, _ in model.named_modules()]
    options, _, job = next(Live(Step(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer)).adapted(4))
    assert options == "LoRA of rank 4"
    assert [name for name, _ in model.named_modules()] == names and all(p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    trained = [p for p in job.step.model.parameters() if p.requires_grad]
    made = job.step.optimizer
    assert made is not None and made.param_groups[0]["params"] == trained and made.defaults["betas"] == (0.8, 0.9)
    addresses = {p.data_ptr() for p in model.parameters()}
    assert sum(p.data_ptr() not in addresses for p in job.step.model.parameters()) == len(trained) > 0
    with job.tracer(torch.device("cpu")) as tracer:
        assert tracer.trace().resident["weights"]


@pytest.mark.slow
def test_a_live_jobs_base_in_4_bits_takes_what_a_described_ones_does() -> None:
    pytest.importorskip("bitsandbytes")
    spec = WorkloadSpec(model="llama-tiny", batch_size=4, seq_len=32, dtype="bf16")
    made = build(spec)
    job = Live(Step(made.model, made.batch, optimizer=torch.optim.AdamW(made.model.parameters())))
    (_, _, adapted), (options, effect, quantised) = job.adapted(16)
    assert options == joined("LoRA of rank 16", FOUR_BITS)
    assert effect == "adapters only are trained on a base in 4 bits, simulated"
    assert not list(quantised.adapted(16))
    described = Described(spec.model_copy(update={"lora": 16, "load_in_4bit": True}))
    with quantised.tracer(torch.device("cpu")) as tracer, described.tracer(torch.device("cpu")) as other:
        live, built = tracer.trace(), other.trace()
    assert live.resident == built.resident and live.peak_bytes == built.peak_bytes
    fewer = quantised.smaller_batch(4, 2)
    assert fewer is not None
    with fewer.tracer(torch.device("cpu")) as tracer:
        assert tracer.trace().resident["weights"] == live.resident["weights"]
    ((options, effect, _),) = adapted.adapted(16)
    assert options == FOUR_BITS and effect.endswith("4 bits, simulated")


@pytest.mark.slow
def test_where_only_a_base_in_4_bits_fits_a_live_search_names_it() -> None:
    pytest.importorskip("bitsandbytes")
    made = build(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=16, lora=4))
    with pytest.raises(InfeasibleError) as caught:
        step = Step(made.model, made.batch, optimizer=made.optimizer)
        run_search(search_request(budget="800KB", step=step, trials=2))
    assert [way.effect for way in caught.value.alternatives] == ["the base in 4 bits, simulated"]


def test_adapters_then_a_base_in_4_bits_by_options() -> None:
    plain = Described(WorkloadSpec(model="llama-tiny"))
    assert [options for options, _, _ in plain.adapted(8)] == ["LoRA of rank 8", joined("LoRA of rank 8", FOUR_BITS)]
    lora = Described(WorkloadSpec(model="llama-tiny", lora=2))
    ((options, _, job),) = lora.adapted(8)
    assert options == FOUR_BITS and job.spec.lora == 2 and job.spec.load_in_4bit
    assert not list(Described(WorkloadSpec(model="llama-tiny", lora=2, load_in_8bit=True)).adapted(8))
