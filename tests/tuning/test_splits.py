"""Plans of two kinds of layers: how they are written, estimated from measured ones, and proposed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import RECOMPUTE, SAVE, Choice
from autockpt.schema.choices import CompileBudget, Selective
from autockpt.tuning.proposers.splits import Cost, Split, estimate, proposals

LAYERS = 8
NAMES = [f"layers.{i}" for i in range(LAYERS)]


def budget(fraction: float) -> Choice:
    return CompileBudget(fraction=fraction)


def kept(choice: Choice) -> float:
    shares = {"save": 1.0, "selective": 0.5, "recompute": 0.0}
    return choice.fraction if isinstance(choice, CompileBudget) else shares[choice.kind]


def linear(split: Split) -> Cost:
    """A model whose layers cost what they keep: 10 bytes and −1 second for each whole layer, of 100 bytes and 20 s."""
    saved = split.count * kept(split.lean) + (LAYERS - split.count) * kept(split.rich)
    return Cost(round(100 + 10 * saved), 20 - saved)


def measured(*choices: Choice) -> dict[Split, Cost]:
    """With each of these on all layers."""
    return {split: linear(split) for split in (Split(choice, choice) for choice in choices)}


def test_splits_are_named_in_words():
    assert str(Split(budget(0.4), budget(0.8), 3)) == "first 3 budget 0.4, then budget 0.8"
    assert str(Split(RECOMPUTE, SAVE, 2)) == "first 2 recompute, then save"
    assert str(Split(Selective(), Selective())) == "selective"


def test_a_split_is_a_plan():
    split = Split(RECOMPUTE, SAVE, 3)
    plan = split.choices(NAMES)
    assert plan == {n: RECOMPUTE if i < 3 else SAVE for i, n in enumerate(NAMES)}
    assert Split.of(list(plan.values())) == split
    assert Split.of([budget(0.4)] * LAYERS) == Split(budget(0.4), budget(0.4))
    assert Split.of([RECOMPUTE, SAVE, RECOMPUTE]) is None


fractions = st.integers(1, 19).map(lambda n: n * 0.05)


@given(fractions, fractions, st.integers(0, LAYERS))
def test_in_one_graph_there_is_one_budget(lean, rich, count):
    known = measured(RECOMPUTE, budget(lean), budget(rich), SAVE)
    for split in proposals(known, 120 + count, "model", LAYERS):
        budgets = {c for c in map(str, split.choices(NAMES).values()) if c.startswith("compile_budget")}
        assert len(budgets) <= 1


def test_estimates_lie_between_measured_plans_and_never_beyond():
    known = measured(RECOMPUTE, SAVE)
    assert estimate(known, RECOMPUTE, SAVE, 4, LAYERS) == linear(Split(RECOMPUTE, SAVE, 4))
    assert estimate(known, budget(0.2), SAVE, 4, LAYERS) is None


def test_the_fastest_that_should_fit_is_proposed_first():
    known = measured(RECOMPUTE, budget(0.4), Selective(), SAVE)
    ideas = proposals(known, 145, "layers", LAYERS)
    assert all(linear(split).peak_bytes <= 145 for split in ideas)
    assert all(lean in [split.lean for split in ideas] for lean in (Selective(), budget(0.4)))
    seconds = [linear(split).seconds for split in ideas]
    assert seconds == sorted(seconds) and min(seconds) < known[Split(Selective(), Selective())].seconds
    known |= {split: linear(split) for split in ideas}
    assert not set(proposals(known, 145, "layers", LAYERS)) & set(known)
    whole = proposals(measured(RECOMPUTE, budget(0.4), Selective(), SAVE), 145, "model", LAYERS)
    assert whole and all(not isinstance(split.lean, CompileBudget) for split in whole)


def test_a_worse_peak_moves_the_next_proposal():
    known = measured(RECOMPUTE, SAVE)
    (first,) = proposals(known, 140, "layers", LAYERS)
    known[first] = Cost(160, 16.0)
    (second,) = proposals(known, 140, "layers", LAYERS)
    assert second.count > first.count


def test_where_nothing_can_be_faster_nothing_is_proposed():
    known = {split: Cost(100, 10.0 + kept(split.rich)) for split in measured(RECOMPUTE, SAVE)}
    assert proposals(known, 120, "layers", LAYERS) == []
