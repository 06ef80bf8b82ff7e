"""Which lengths get choices of their own, and what that is said to gain."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.errors import InfeasibleError, UsageError
from autockpt.schema import (
    RECOMPUTE,
    SAVE,
    Comparison,
    Measurement,
    Plan,
    ResolvedBudget,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    Silence,
    Unit,
    WorkloadSpec,
    parse_budget,
)
from autockpt.schema.lengths import Lengths
from autockpt.tuning.clock import Clock
from autockpt.tuning.sequence_lengths import MOST_SETS, WORTH, Expected, search_lengths
from tests.errors import raises
from tests.samples import environment
from tests.tuning.made_up import Watcher

UNITS = [Unit(name=f"layers.{i}", cls="Layer", kind=0) for i in range(10)]
TAIL = Lengths(counts={100: 60, 200: 25, 400: 10, 800: 4, 1600: 1}, of="batches")


def made(length: int, *, fits: int = 400, most: float = 0.3, rows: int = 4, **settings: Any) -> Plan:
    """What a search says where saving everything fits up to ``fits`` tokens, and recomputing adds ``most`` at 1600."""
    over = max(0.0, min(1.0, (length - fits) / max(1, 1600 - fits)))
    chosen = {u.name: RECOMPUTE if i < round(10 * over) else SAVE for i, u in enumerate(UNITS)}
    plain = Measurement(peak_bytes=1000 + 10 * length, step_seconds=0.01 + length / 1000)
    ours = Measurement(
        peak_bytes=min(plain.peak_bytes, 1000 + 10 * fits), step_seconds=plain.step_seconds * (1 + most * over)
    )
    return Plan.create(
        chosen,
        UNITS,
        source="measured",
        measured=ours,
        budget=ResolvedBudget(asked="5000B", bytes=1000 + 10 * fits),
        settings={"batch_size": rows, "attention": "sdpa", **settings},
        baselines=(Comparison(name="none", verdict="fits" if over == 0 else "over_budget", measured=plain),),
    )


def searched(lengths: Lengths, timeout: float | None = None, took: float = 0.0, **of: Any) -> tuple[Any, list[int]]:
    """The plan and the notes on its sets, and the lengths that were searched; each search ``took`` some seconds."""
    asked: list[int] = []

    def search(request: SearchRequest, listener: Any) -> SearchOutcome:
        length = request.described.seq_len or 0
        asked.append(length)
        assert request.trials >= 3
        plan = made(length, **of)
        assert plan.budget is not None
        return SearchOutcome(plan=plan, budget=plan.budget, device=environment().device, rows=plan.baselines)

    request = request_for(lengths=lengths, trials=24, timeout=timeout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "elapsed", property(lambda clock: took * len(asked)))
        patch.setattr("autockpt.tuning.sequence_lengths.run_search", search)
        found = search_lengths(request, Silence())
    return (found.plan, found.notes[len(asked) > 1 :]), asked


def request_for(budget: str = "24GB", spec: Any = None, **more: Any) -> SearchRequest:
    workload = WorkloadSpec.model_validate({"model": "llama-tiny"} | (spec or {}))
    asked = {"budget": parse_budget(budget), "workload": workload, "space": SearchSpace(), "lengths": TAIL}
    return SearchRequest.model_validate(asked | more)


def test_short_batches_save_what_long_ones_recompute() -> None:
    (plan, notes), asked = searched(TAIL)
    assert asked[0] == 1600 and len(asked) == len(set(asked)) <= MOST_SETS + 1
    sets = plan.sets
    assert sets[0].when is not None and sets[0].when.tokens == 4 * 400 and sets[0].when.longest == 400
    assert all(choice == SAVE for choice in sets[0].expand_planned().values())
    assert sets[-1].when is not None and sets[-1].when.tokens == 4 * 1600
    assert sum(s.share or 0 for s in sets) == pytest.approx(1, abs=1e-3)
    assert plan.status == "measured" and sets[0].share == pytest.approx(0.95)
    assert "measured steps" in notes[0] and "-" in notes[0]


def test_no_further_length_is_begun_when_it_is_late() -> None:
    for took, most in ((90.0, 1), (45.0, 2), (1.0, 9)):
        (plan, notes), asked = searched(TAIL, timeout=100.0, took=took)
        assert ("no time was left" in notes[0]) == (most == 1)
        assert len(asked) <= most and asked[0] == TAIL.longest and len(plan.sets) <= len(asked)
    assert len(asked) > 2


def test_flash_attention_bounds_tokens_alone() -> None:
    (plan, _), _ = searched(TAIL, attention="flash_attention_2")
    assert all(each.when is not None and each.when.longest is None for each in plan.sets)


def test_one_set_where_everything_fits_or_nothing_is_gained() -> None:
    (plan, notes), asked = searched(TAIL, fits=1600)
    assert asked == [1600] and not plan.smaller_batches and "do not matter" in notes[0]
    (plan, notes), _ = searched(TAIL, most=0.004)
    assert not plan.smaller_batches and "One set" in notes[0]
    (plan, notes), asked = searched(Lengths(counts={1600: 5}))
    assert asked == [1600] and not plan.smaller_batches


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.dictionaries(st.integers(1, 1599), st.integers(1, 1000), min_size=1, max_size=30),
    st.integers(1, 1500),
    st.floats(0.0, 1.0),
)
def test_sets_cover_all_lengths_fit_and_each_is_worth_it(counts: dict[int, int], fits: int, most: float) -> None:
    lengths = Lengths(counts={**counts, 1600: 1}, of="batches")
    (plan, _), asked = searched(lengths, fits=fits, most=most)
    bounds = [each.when.longest for each in plan.sets if each.when is not None and each.when.longest]
    assert len(asked) <= MOST_SETS + 1 and set(bounds) <= set(asked)
    if not plan.smaller_batches:
        return
    assert bounds[-1] == 1600 and len(bounds) <= MOST_SETS
    for each, bound in zip(plan.sets, bounds, strict=True):
        assert each.choices == made(bound, fits=fits, most=most).choices
    expected = Expected(lengths.batches(4), {n: made(n, fits=fits, most=most) for n in asked})
    for bound in bounds[:-1]:
        without = [n for n in bounds if n != bound]
        assert expected.seconds(bounds) <= expected.seconds(without) * (1 + 1e-9)
    assert expected.seconds(bounds) <= expected.seconds([1600]) * (1 - WORTH)


def test_compiled_layers_are_not_offered_what_sets_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()
    asked = request_for(compile="layers", trials=4)
    spaces: list[tuple[str, ...]] = []

    def search(request: SearchRequest, listener: Any) -> Any:
        spaces.append(request.space.choices)
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr("autockpt.tuning.sequence_lengths.run_search", search)
    with pytest.raises(InfeasibleError):
        search_lengths(asked, watcher)
    assert "recompute" in spaces[0] and not {"offload", "recompute_offload"} & set(spaces[0])
    assert "leave out" in watcher.notes[0] and "offload" in watcher.notes[0]


@pytest.mark.parametrize(("budget", "spec"), [("60%", {}), ("24GB", {"packed": True})])
def test_what_cannot_be_asked_is_refused(budget: str, spec: dict[str, Any]) -> None:
    with raises(UsageError):
        search_lengths(request_for(budget, spec), Silence())


def test_batches_without_rows_are_refused() -> None:
    with raises(UsageError):
        searched(TAIL, batch_size=None)
