"""Micro-batch and plan as one question: which sizes are searched, what is named, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autockpt.errors import InfeasibleError, TimeLimitReached, UsageError
from autockpt.schema import (
    Comparison,
    Measurement,
    ResolvedBudget,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    Silence,
    WorkloadSpec,
    parse_budget,
)
from autockpt.shipped import load_hardware
from autockpt.tuning import answer as answered
from autockpt.tuning import batch_sizes, search_request
from autockpt.tuning.batch_sizes import Climb, refuse_dependent_rows, search_batch_sizes
from autockpt.tuning.clock import Clock
from autockpt.tuning.job_sizes import job_of
from tests.errors import raises
from tests.samples import environment
from tests.tuning.small import TWO_LAYERS, of_rows, squares


def request(out: Path = Path("unused"), **more: Any) -> SearchRequest:
    spec = WorkloadSpec.model_validate({"model": "llama-tiny"} | more.pop("workload", {}))
    given = {"budget": parse_budget("24GB"), "workload": spec, "space": SearchSpace(), "out": out, "trials": 20}
    return SearchRequest.model_validate(given | more)


def outcome(seconds: float) -> SearchOutcome:
    """What a search says whose best plan takes this long; a plan is not needed to climb."""
    row = Comparison(name="ours", verdict="fits", measured=Measurement(peak_bytes=1, step_seconds=seconds))
    budget = ResolvedBudget(asked="24GB", bytes=24 * 10**9)
    return SearchOutcome(plan=None, budget=budget, device=environment().device, rows=(row,), settings={"tokens": 4096})


class Made(Climb):
    """Sizes whose update takes as many seconds as a table says; sizes missing there do not fit."""

    def best(self, size: int) -> Any:
        found = self.found.get(size)
        return None if found is None else batch_sizes.batch_setting(size, self.rows, found)


def climb_of(table: dict[int, float], rows: int) -> Made:
    def search(size: int, trials: int, left: float | None) -> SearchOutcome:
        if size not in table:
            raise InfeasibleError("nothing fits")
        return outcome(table[size])

    return Made(rows, search, Clock(Silence()))


@settings(deadline=None)
@given(st.data())
def test_the_summit_of_tokens_per_second_is_found(data: st.DataObject) -> None:
    rows = 2 ** data.draw(st.integers(0, 8))
    sizes = [2**i for i in range(rows.bit_length())]
    largest = data.draw(st.sampled_from(sizes))
    fitting = [s for s in sizes if s <= largest]
    summit = data.draw(st.sampled_from(fitting))
    steps = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(fitting), max_size=len(fitting)))
    seconds = {summit: 10.0}
    for s, step in zip([s for s in fitting if s > summit], steps, strict=False):
        seconds[s] = seconds[s // 2] + step
    for s, step in zip([s for s in reversed(fitting) if s < summit], steps, strict=False):
        seconds[s] = seconds[2 * s] + step
    climb = climb_of(seconds, rows)
    assert climb.summit(sizes, data.draw(st.sampled_from(fitting)), largest, 3, 100) == summit
    assert len(climb.found) <= len(sizes)


def test_a_single_row_that_does_not_fit_is_infeasible() -> None:
    with raises(InfeasibleError):
        climb_of({}, 2).summit([1, 2], 1, 1, 3, 100)


def test_batches_that_cannot_be_divided_are_refused() -> None:
    odd = of_rows(squares, y=torch.zeros(3))
    thrice = replace(odd, accumulate=3)
    for step, rows, budget in ((odd, 4, "1GB"), (odd, 4, "60%"), (thrice, 16, "1GB")):
        with raises(UsageError):
            answered(search_request(budget=budget, step=step, global_batch=rows, trials=3))


def test_one_worse_size_above_is_passed_over() -> None:
    sizes = [1, 2, 4, 8, 16]
    assert climb_of({2: 10.0, 4: 10.5, 8: 9.0, 16: 9.5}, 16).summit(sizes, 2, 16, 3, 100) == 8
    tired = climb_of({1: 20.0, 2: 10.0, 4: 10.5, 8: 10.6, 16: 1.0}, 16)
    assert tired.summit(sizes, 2, 16, 3, 100) == 2 and set(tired.found) == {1, 2, 4, 8}


def test_sizes_that_there_was_no_time_for_are_said() -> None:
    climb = climb_of({1: 1.0, 2: 1.0, 4: 1.0}, 4)
    climb.clock.timeout = 60.0
    climb.at(1, 3)
    assert not any("time limit" in note for note in climb.answer().notes)
    climb.clock.began -= 52.0
    assert climb.at(2, 3) is None and climb.at(4, 3) is None and climb.at(1, 3) is not None
    answer = climb.answer()
    assert "60 s left none for micro-batches of 2, 4: " in answer.notes[0]
    assert answer.best.batch_size == 1 and not answer.others


def test_a_size_whose_time_ran_out_leaves_the_answers_of_others() -> None:
    def search(size: int, trials: int, left: float | None) -> SearchOutcome:
        if size == 2:
            raise TimeLimitReached("too slow")
        return outcome(1.0)

    climb = Made(4, search, Clock(Silence(), 60.0))
    with pytest.raises(TimeLimitReached):
        climb.at(2, 3)
    assert climb.at(1, 3) is not None and climb.at(2, 3) is None and climb.skipped == {2}


def test_an_interrupt_ends_the_searches_of_all_sizes() -> None:
    def search(size: int, trials: int, left: float | None) -> SearchOutcome:
        return outcome(1.0).model_copy(update={"interrupted": True})

    with pytest.raises(KeyboardInterrupt):
        Made(2, search, Clock(Silence())).at(1, 3)


@pytest.mark.parametrize("asked", [{"workload": {"accumulate": 4}}, {"budget": parse_budget("60%act")}])
def test_what_cannot_be_asked_is_refused_before_anything_runs(asked: dict[str, Any], monkeypatch) -> None:
    monkeypatch.delattr("autockpt.tuning.batch_sizes.run_search")
    with raises(UsageError):
        search_batch_sizes(request(rows_per_update=8, **asked), Silence())


def contrasted(out: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))


def look_at(loss: Any, normed: bool = False) -> None:
    asked = search_request(budget="1GB", step=of_rows(loss, normed=normed))

    def job(size: int) -> SearchRequest:
        made = job_of(asked, batch_size=size)
        assert made.step.batch["x"].shape == (size, 8)
        return made

    refuse_dependent_rows(job)


@pytest.mark.slow
def test_rows_that_depend_on_each_other_are_refused() -> None:
    look_at(squares)
    for loss, normed, where in ((squares, True, "batch_norm in layers"), (contrasted, False, "mm")):
        with raises(UsageError, where):
            look_at(loss, normed)


@pytest.mark.slow
def test_a_simulated_search_names_the_most_tokens_per_second(tmp_path: Path) -> None:
    space = SearchSpace().restricted(("recompute",))
    asked = request(
        tmp_path,
        rows_per_update=2,
        hardware=load_hardware("rtx4090"),
        budget=parse_budget("600MB"),
        space=space,
        workload={"model": TWO_LAYERS, "batch_size": 1, "seq_len": 64},
    )
    answer = search_batch_sizes(asked, Silence())
    assert answer.best.batch_size * answer.best.accumulate == 2
    assert all(other.per_second <= answer.best.per_second for other in answer.others)
    alike = any(other.update_seconds <= 1.02 * answer.best.update_seconds for other in answer.others)
    assert any("cannot distinguish" in note for note in answer.notes) == alike
    assert answer.outcome.plan is not None and answer.outcome.plan.workload is not None
    assert answer.outcome.plan.workload.batch_size == answer.best.batch_size
    assert answer.best.score.peak_bytes <= 600 * 10**6
