"""Histograms of sequence lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.errors import UsageError
from autockpt.schema.lengths import Lengths, parse_lengths

COUNTS = st.dictionaries(st.integers(1, 1 << 20), st.integers(1, 1 << 20), min_size=1, max_size=300)


@given(COUNTS)
def test_what_is_written_is_read(counts: dict[int, int]) -> None:
    wanted = Lengths(counts=counts)
    assert parse_lengths(",".join(f"{n}:{c}" for n, c in counts.items())) == wanted
    assert Lengths.model_validate_json(wanted.model_dump_json()) == wanted
    assert list(wanted.counts) == sorted(counts) and wanted.longest == max(counts)


def test_a_lengths_file_holds_lengths_or_lengths_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n12\n\n# a remark\n400 7\n5,1 # rare\n")
    assert parse_lengths(str(file)).counts == {5: 1, 12: 2, 400: 7}


@pytest.mark.parametrize("wrong", ["12\n-3\n", "12 x\n", "", "0:4", "1.5", "17000000", "17000000000"])
def test_other_files_are_refused_with_their_line(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(wrong)
    with pytest.raises(UsageError) as caught:
        parse_lengths(str(file))
    assert str(file) in caught.value.message and caught.value.remedy
    with pytest.raises(UsageError):
        parse_lengths(str(tmp_path / "none"))


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
