"""Which changes of a job are tried, and in which order; whether they fit is asked of ghost runs elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autockpt.errors import ConflictError, InfeasibleError, UsageError
from autockpt.schema import SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from autockpt.schema.trial import Alternative
from autockpt.tuning import infeasible, job_sizes, search_request
from autockpt.tuning.clock import Clock
from autockpt.tuning.infeasible import FOUR_BITS, INEXACT, SHARED, SMALLER, Change, joined
from autockpt.workload import Step
from tests.errors import raises

SPEC = WorkloadSpec(model="llama-1b", batch_size=4, seq_len=1024)
SMALLER_BATCH = "batch size 2, accumulate 2"
SETTINGS = {"batch_size": 4, "seq_len": 1024, "tokens": 4096}


def request_of(budget: str = "1KB") -> SearchRequest:
    return SearchRequest(budget=parse_budget(budget), space=SearchSpace(), workload=SPEC)


@pytest.mark.parametrize("needed", [(INEXACT, "batch size"), ("LoRA", "batch size"), ("sequences",)])
def test_combinations_come_after_singles_and_shorter_rows_last(
    needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def mildest(changes: Any, bench: Any, standard: float, hopeful: bool = False) -> Alternative | None:
        for change in changes:
            asked.append(change.options)
            if all(option in change.options for option in needed):
                return Alternative(
                    options=change.options, effect=change.effect, plan="p", peak_bytes=1, step_seconds=None,
                    relative_cost=1.0,
                )  # fmt: skip
        return None

    monkeypatch.setattr(infeasible, "_mildest", mildest)
    monkeypatch.setattr(
        infeasible, "predictions", lambda *_: {"recompute": SimpleNamespace(peak_bytes=10, step_seconds=1.0)}
    )
    bench: Any = SimpleNamespace(budget_bytes=5, late=lambda: False, listener=Silence())
    base: Any = {"recompute": ({}, SimpleNamespace(resident={}))}
    changes = infeasible.alternatives(request_of(), SETTINGS, base, bench)
    assert changes and all(option in changes[0].options for option in needed)
    single = [SMALLER_BATCH, "batch size 1, accumulate 4", INEXACT, "LoRA of rank 16"]
    assert asked[:4] == single
    assert any("sequences" in options for options in asked) == ("sequences" in needed)
    assert asked.index(SMALLER_BATCH) < asked.index(joined(SMALLER_BATCH, INEXACT))


@contextmanager
def naming(
    *notes: str, left_out: tuple[str, ...] = (), timeout: float | None = None, budget: str = "1KB"
) -> Iterator[None]:
    """The alternatives for a job that needs 1,000 B while it saves everything, after two seconds."""
    tracer = SimpleNamespace(settings=SETTINGS, notes=notes, head=None)
    graph = SimpleNamespace(resident={})
    facts = {"tracer": tracer, "heads": {}, "twin": None, "left_out": left_out}
    found: Any = SimpleNamespace(**facts, uniform={"recompute": ({}, graph)}, plain=graph)
    clock = Clock(Silence(), timeout)
    clock.began -= 2.0
    bench: Any = job_sizes.WhatIf(5, cast("Any", None), ("recompute",), None)
    facts = {"request": request_of(budget), "environment": None, "used_by_others": 0}
    prepared: Any = SimpleNamespace(**facts, traced=found, bytes_needed=lambda graph: 1000)
    try:
        yield
    except InfeasibleError as error:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(infeasible, "what_if_of", lambda *_: bench)
            infeasible.explain_refusal(error, prepared, None, None, clock)
        raise


@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_time_limit_ends_the_search_for_changes_too(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[SearchRequest] = []

    def tracer_of(job: SearchRequest, **_: Any) -> Any:
        traced.append(job)
        raise ConflictError("cannot be traced")

    monkeypatch.setattr(job_sizes, "tracer_of", tracer_of)
    monkeypatch.setattr(
        infeasible, "predictions", lambda *_: {"recompute": SimpleNamespace(peak_bytes=10, step_seconds=1.0)}
    )
    with pytest.raises(InfeasibleError) as refused, naming(timeout=limit):
        raise InfeasibleError("nothing fits", remedy=f"Raise the budget, or {SMALLER}.")
    assert bool(traced) is (limit is None)
    assert ("no longer than the time limit of 1 s" in refused.value.remedy) is (limit is not None)
    assert ("were ghost-run: none fits" in refused.value.remedy) is (limit is None)
    assert ("smaller batch" in refused.value.remedy) is (limit is not None), "what fails is no advice"


def test_an_infeasible_share_names_the_least_that_is_enough() -> None:
    """A smaller batch is no way out: it needs a larger share of its own peak."""
    with pytest.raises(InfeasibleError) as refused, naming(budget="60%"):
        raise InfeasibleError("nothing fits", remedy=f"Raise the budget, or {SMALLER}.", smallest_peak=901)
    remedy = refused.value.remedy
    assert remedy.startswith("Raise the budget. A share is of") and "needs 91 % of it" in remedy and "60%act" in remedy
    assert "batch" not in remedy


def test_what_was_assumed_is_said_with_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Alternative(
        options="LoRA of rank 16", effect="e", plan="p", peak_bytes=1, step_seconds=None, relative_cost=1.0
    )
    monkeypatch.setattr(infeasible, "alternatives", lambda *_, **__: (way,))
    with pytest.raises(InfeasibleError) as refused, naming("Experts is not quantised", left_out=("lstm holds most",)):
        raise InfeasibleError("nothing fits")
    remedy = refused.value.remedy
    assert "LoRA of rank 16" in remedy and remedy.endswith("\n• Experts is not quantised\n• lstm holds most")
    assert refused.value.alternatives == (way,)
    with pytest.raises(InfeasibleError) as without, naming():
        raise InfeasibleError("nothing fits")
    assert remedy.startswith(without.value.remedy) and "counted" not in without.value.remedy


ROWS, LENGTH = 4, 16


def job(**more: Any) -> Change:
    return Change(search_request(budget="1GB", **more))


def described(**spec: Any) -> Change:
    return job(workload=WorkloadSpec(**{"model": "llama-tiny"} | spec))


def live(**batch: Any) -> Change:
    model = nn.Linear(3, 3)
    step = Step(model, batch, loss=lambda m, b: m(b).sum(), optimizer=torch.optim.AdamW(model.parameters()))
    return job(step=step)


def shapes(change: Change) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in change.job.step.batch.items()}


def test_a_live_batch_is_cut_by_rows_and_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infeasible, "SHORTEST", LENGTH // 2)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    mask, scale = torch.zeros(ROWS, 1, LENGTH, LENGTH), torch.tensor(1.0)
    long = live(input_ids=ids, mask=mask, scale=scale, pixels=torch.zeros(ROWS, 3, LENGTH))
    smaller, _ = infeasible._smaller_batches(long, ROWS)
    assert shapes(smaller) == {"input_ids": (2, 16), "mask": (2, 1, 16, 16), "scale": (), "pixels": (2, 3, 16)}
    assert smaller.job.step.accumulate == 2 and smaller.job.step.settings["batch_size"] == 2
    assert smaller.options == SMALLER_BATCH
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


def test_more_devices_are_tried_where_they_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infeasible, "MOST_RANKS", 8)
    simulated = job(workload=WorkloadSpec(model="llama-tiny", shard=2), hardware="h100")
    changes = [*infeasible._sharded(simulated)]
    assert [change.job.described.shard for change in changes] == [4, 8]
    assert [change.options for change in changes] == [f"{SHARED} {ranks} devices" for ranks in (4, 8)]
    assert not list(infeasible._sharded(described())), "real steps are not measured on several devices"
