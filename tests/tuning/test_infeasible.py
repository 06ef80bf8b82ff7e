"""Which changes of a job are tried, and in which order; whether they fit is asked of ghost runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autockpt.errors import ConflictError, InfeasibleError
from autockpt.schema import SearchRequest, Silence, WorkloadSpec, parse_budget
from autockpt.schema.choices import ChunkedLoss
from autockpt.schema.outlook import INEXACT, SMALLER, Alternative, batch, joined
from autockpt.shipped import load_space
from autockpt.tuning import infeasible, sizes
from autockpt.tuning.clock import Clock

IN_CHUNKS = ChunkedLoss(tokens=256)
SPEC = WorkloadSpec(model="llama-1b", batch_size=4, seq_len=1024)
SETTINGS = {"batch_size": 4, "seq_len": 1024, "tokens": 4096}


def request_of(budget: str = "1KB") -> SearchRequest:
    return SearchRequest(budget=parse_budget(budget), space=load_space("knobs"), workload=SPEC)


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
    ways = infeasible.alternatives(request_of(), SETTINGS, base, bench)
    assert ways and all(option in ways[0].options for option in needed)
    single = [batch(2, 2), batch(1, 4), INEXACT, "LoRA of rank 16"]
    assert asked[:4] == single
    assert any("sequences" in options for options in asked) == ("sequences" in needed)
    assert asked.index(batch(2, 2)) < asked.index(joined(batch(2, 2), INEXACT))


@contextmanager
def naming(
    *notes: str, left_out: tuple[str, ...] = (), timeout: float | None = None, budget: str = "1KB"
) -> Iterator[None]:
    """The alternatives for a job that needs 1,000 B while it saves everything, after two seconds."""
    tracer = SimpleNamespace(settings=SETTINGS, notes=notes, head=None)
    graph = SimpleNamespace(resident={})
    facts = {"tracer": tracer, "heads": None, "twin": None, "left_out": left_out}
    found: Any = SimpleNamespace(**facts, uniform={"recompute": ({}, graph)}, plain=graph)
    clock = Clock(Silence(), timeout)
    clock.began -= 2.0
    bench: Any = sizes.WhatIf(5, cast("Any", None), cast("Any", None), ("recompute",), None)
    facts = {"request": request_of(budget), "environment": None, "used_by_others": 0}
    prepared: Any = SimpleNamespace(**facts, found=found, needs=lambda graph: 1000)
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

    def tracer_of(job: SearchRequest, device: Any) -> Any:
        traced.append(job)
        raise ConflictError("cannot be traced")

    monkeypatch.setattr(sizes, "tracer_of", tracer_of)
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
    assert remedy.startswith("Raise the budget. A share is of") and "needs 91% of it" in remedy and "60%act" in remedy
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
