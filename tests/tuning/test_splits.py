"""Plans of two kinds of layers: how they are written, estimated from measured ones, and proposed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import RECOMPUTE, SAVE
from autockpt.schema.choices import CompileBudget
from autockpt.tuning.proposers.splits import Cost, Split, estimate, proposals

LAYERS = 8
NAMES = [f"layers.{i}" for i in range(LAYERS)]
fractions = st.integers(0, 20).map(lambda n: n * 0.05)


def linear(split: Split) -> Cost:
    """A model whose layers cost what they keep: 10 bytes and −1 second for each whole layer, of 100 bytes and 20 s."""
    kept = split.count * split.lean + (LAYERS - split.count) * split.rich
    return Cost(round(100 + 10 * kept), 20 - kept)


def test_splits_are_named_in_words():
    assert str(Split(0.4, 0.8, 3)) == "first 3 budget 0.4, then budget 0.8"
    assert str(Split(0.0, 1.0, 2)) == "first 2 recompute, then save"
    assert str(Split(0.55, 0.55, 0)) == "budget 0.55"


def test_a_split_is_a_plan():
    assert Split(0.0, 1.0, 3).choices(NAMES) == {n: RECOMPUTE if i < 3 else SAVE for i, n in enumerate(NAMES)}
    assert all(c == CompileBudget(fraction=0.4) for c in Split(0.4, 0.4, 0).choices(NAMES).values())


@given(fractions, fractions, st.integers(0, LAYERS))
def test_in_one_graph_there_is_one_budget(lean, rich, count):
    known = {s: linear(s) for s in (Split(f, f, 0) for f in (0.0, lean, rich, 1.0))}
    for split in proposals(known, 120 + count, "model", LAYERS):
        budgets = {c for c in map(str, split.choices(NAMES).values()) if c.startswith("compile_budget")}
        assert len(budgets) <= 1


def test_estimates_lie_between_measured_plans_and_never_beyond():
    known = {s: linear(s) for s in (Split(0.0, 0.0, 0), Split(1.0, 1.0, 0))}
    assert estimate(known, Split(0.0, 1.0, 4), LAYERS) == linear(Split(0.0, 1.0, 4))
    assert estimate(known, Split(0.2, 1.0, 4), LAYERS) is None


def test_the_fastest_that_should_fit_is_proposed_first_and_nothing_known():
    uniform = [Split(f, f, 0) for f in (0.0, 0.4, 1.0)]
    known = {s: linear(s) for s in uniform}
    ideas = proposals(known, 145, "layers", LAYERS)
    assert all(linear(split).peak_bytes <= 145 for split in ideas)
    seconds = [linear(split).seconds for split in ideas]
    assert seconds == sorted(seconds) and min(seconds) < linear(uniform[1]).seconds
    known |= {split: linear(split) for split in ideas}
    assert not set(proposals(known, 145, "layers", LAYERS)) & set(known)
    assert all(split.lean == 0.0 for split in proposals({s: linear(s) for s in uniform}, 145, "model", LAYERS))


def test_a_peak_that_is_worse_than_it_should_be_moves_the_next_proposal():
    known = {s: linear(s) for s in (Split(0.0, 0.0, 0), Split(1.0, 1.0, 0))}
    (first,) = proposals(known, 140, "layers", LAYERS)
    known[first] = Cost(160, 16.0)
    (second,) = proposals(known, 140, "layers", LAYERS)
    assert second.count > first.count


def test_where_nothing_can_be_faster_nothing_is_proposed():
    known = {s: Cost(100, 10.0 + s.rich) for s in (Split(0.0, 0.0, 0), Split(1.0, 1.0, 0))}
    assert proposals(known, 120, "layers", LAYERS) == []
