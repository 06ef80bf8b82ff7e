"""The largest batch and the longest sequence that fit, by a few ghost runs."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt import estimate
from autockpt.errors import UsageError
from autockpt.schema import SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from autockpt.tuning.job_sizes import largest_that_fits, with_longest
from autockpt.workload import Step
from tests.policies.zoo import CASES
from tests.tracing.reference import ghosts
from tests.tuning.small import TWO_LAYERS, of_rows, squares

LLAMA = CASES["llama"]
SPEC = WorkloadSpec(model=TWO_LAYERS, batch_size=2, seq_len=64)


@given(
    sizes=st.lists(st.integers(1, 4096), min_size=1, unique=True).map(sorted),
    base=st.integers(0, 10**6),
    slope=st.integers(0, 10**5),
    bend=st.integers(0, 50),
    torn=st.integers(0, 10**5),
    refused=st.integers(1, 8192),
    budget_bytes=st.integers(1, 10**8),
    first=st.none() | st.integers(1, 4096),
)
def test_the_largest_that_fits_is_found_in_few_questions(
    sizes: list[int], base: int, slope: int, bend: int, torn: int, refused: int, budget_bytes: int, first: int | None
) -> None:
    asked: list[int] = []

    def needed(size: int) -> float:
        asked.append(size)
        grown = base + (slope + torn) * size + bend * size * size
        return math.inf if size >= refused else max(grown - torn * (size % 3) / 3, 0)

    found = largest_that_fits(sizes, needed, budget_bytes, first)
    assert len(asked) == len(set(asked)) <= 3 * (len(sizes).bit_length() + 1)
    above = sizes[sizes.index(found) + 1 :] if found is not None else sizes
    assert found is None or needed(found) <= budget_bytes
    assert not above or needed(above[0]) > budget_bytes


def test_on_a_line_three_questions_are_enough() -> None:
    asked: list[int] = []

    def needed(size: int) -> int:
        asked.append(size)
        return 1000 + 50 * size

    assert largest_that_fits(range(1, 257), needed, 10_000, first=4) == 180 and len(asked) <= 5, asked


@pytest.mark.slow
def test_twice_what_is_found_does_not_fit() -> None:
    space = SearchSpace().restricted(("recompute",))
    asked = SearchRequest(budget=parse_budget("40MB"), space=space, workload=SPEC, device="cpu", longest=True)
    found = with_longest(asked, Silence())
    tokens = found.described.seq_len
    assert tokens is not None and tokens > 64 and f"{tokens:,} tokens" in found.notes[0] and not found.longest
    (graph,) = ghosts(SPEC.model_copy(update={"seq_len": 2 * tokens}), "recompute")
    assert asked.budget.size is not None and graph.peak_bytes > asked.budget.size


def test_a_live_step_is_estimated_at_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By plans for its own budget alone: no row shows what others would buy."""
    for module in ("tuning.outcome", "analysis.why"):
        monkeypatch.setattr(f"autockpt.{module}.look_around", None)
    few = partial(SearchRequest, space=SearchSpace().restricted(("recompute", "offload")))
    monkeypatch.setattr("autockpt.tuning.estimates.SearchRequest", few)
    model = LLAMA.make()
    step = Step(model, LLAMA.batch(), optimizer=torch.optim.AdamW(model.parameters()))
    small, large = estimate(step, batch_sizes=[1, 4], seq_lens=[8])
    assert [(row.batch_size, row.seq_len) for row in (small, large)] == [(1, 8), (4, 8)]
    assert small.fits and large.fits and small.peak_bytes and large.peak_bytes and not small.note + large.note
    assert small.peak_bytes < large.peak_bytes
    (own,) = estimate(of_rows(squares, normed=True))  # whose rows depend on each other
    assert own.fits and own.seq_len is None
    with pytest.raises(UsageError):
        estimate(step, cards="rtx4090")
