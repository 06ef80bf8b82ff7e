"""Two-run plans of compiled layers: proposed by what plans with one choice on all layers were measured to cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import RECOMPUTE, SAVE, Choice, Measurement, Trial
from autockpt.schema.choices import CompileBudget, Selective
from autockpt.tuning.compiled import proposals
from tests.samples import trial

NAMES = [f"layers.{i}" for i in range(8)]


def budget(fraction: float) -> Choice:
    return CompileBudget(fraction=fraction)


def cost(plan: dict[str, Choice], more: int = 0) -> Measurement:
    """Layers that cost what they keep: 10 bytes and −1 second for each whole one, of 100 bytes and 20 s."""
    shares = {"save": 1.0, "selective": 0.5, "recompute": 0.0}
    saved = sum(c.fraction if isinstance(c, CompileBudget) else shares[c.kind] for c in plan.values())
    return Measurement(peak_bytes=round(100 + 10 * saved) + more, step_seconds=20 - saved)


def measured(*plans: dict[str, Choice], more: int = 0) -> list[Trial]:
    return [trial(n, choices=plan, measured=cost(plan, more)) for n, plan in enumerate(plans)]


def alike(*choices: Choice) -> list[Trial]:
    return measured(*(dict.fromkeys(NAMES, choice) for choice in choices))


fractions = st.integers(1, 19).map(lambda n: n * 0.05)


@given(fractions, fractions, st.integers(0, 8))
def test_in_one_graph_there_is_one_budget(lean: float, rich: float, count: int) -> None:
    known = alike(RECOMPUTE, budget(lean), budget(rich), SAVE)
    for plan in proposals(NAMES, known, 120 + count, one_graph=True):
        assert sum(isinstance(choice, CompileBudget) for choice in dict.fromkeys(plan.values())) <= 1


def test_the_fastest_that_should_fit_is_proposed_first() -> None:
    known = alike(RECOMPUTE, budget(0.4), Selective(), SAVE)
    ideas = proposals(NAMES, known, 145)
    assert ideas and all(cost(plan).peak_bytes <= 145 for plan in ideas)
    seconds = [cost(plan).step_seconds for plan in ideas]
    assert seconds == sorted(seconds) and seconds[0] < 20 - 8 * 0.5
    assert all(list(plan.values()) == sorted(plan.values(), key=lambda c: cost({"": c}).peak_bytes) for plan in ideas)
    assert not [plan for plan in proposals(NAMES, [*known, *measured(*ideas)], 145) if plan not in ideas]


def test_a_worse_peak_moves_the_next_proposal() -> None:
    (first,) = proposals(NAMES, alike(RECOMPUTE, SAVE), 140)
    (second,) = proposals(NAMES, [*alike(RECOMPUTE, SAVE), *measured(first, more=20)], 140)
    assert list(second.values()).count(RECOMPUTE) == list(first.values()).count(RECOMPUTE) + 2


def test_where_nothing_can_be_faster_nothing_is_proposed() -> None:
    lean = dict.fromkeys(NAMES, RECOMPUTE)
    known = [trial(0, choices=lean, measured=Measurement(peak_bytes=100, step_seconds=10.0)), *alike(SAVE)]
    assert proposals(NAMES, known, 120) == [] == proposals(NAMES, [], 120)
