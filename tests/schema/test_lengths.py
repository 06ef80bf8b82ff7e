"""Histograms of sequence lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema.lengths import Lengths

COUNTS = st.dictionaries(st.integers(1, 1 << 20), st.integers(1, 1 << 20), min_size=1, max_size=300)


@pytest.mark.slow
@given(COUNTS, st.integers(1, 64), st.integers(1, 60))
def test_shares_of_batches_add_up_and_none_is_taken_as_shorter(counts: dict[int, int], rows: int, levels: int) -> None:
    lengths = Lengths(counts=counts)
    exact, rounded = lengths.batches(rows, 1 << 30), lengths.batches(rows, levels)
    assert sum(rounded.values()) == pytest.approx(1) and max(rounded) == max(counts)
    assert len(rounded) <= levels + 1 and (rounded == exact or len(exact) > levels)
    for length in rounded:
        assert (
            sum(s for n, s in exact.items() if n <= length) >= sum(s for n, s in rounded.items() if n <= length) - 1e-9
        )


def test_longer_sequences_are_cut_off() -> None:
    assert Lengths(counts={5: 1, 9: 2, 100: 3}).cut(9).counts == {5: 1, 9: 5}
    assert Lengths(counts={5: 1, 9: 2}, of="batches").cut(6) == Lengths(counts={5: 1, 6: 2}, of="batches")
    assert "half of them up to 9" in str(Lengths(counts={5: 1, 9: 2, 100: 3}))
