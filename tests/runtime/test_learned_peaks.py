"""What batches take by what smaller, larger and equal ones took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autockpt.runtime.learned_peaks import LearnedPeaks

sizes = st.integers(1, 100_000)


@given(st.lists(sizes, min_size=1, max_size=12), sizes, st.integers(0, 10**9), st.integers(0, 10**5), st.integers(0, 9))
def test_no_batch_is_taken_for_smaller_than_it_is(seen, asked, fixed, linear, square) -> None:
    def takes(tokens: int, square: int = square) -> int:
        return fixed + linear * tokens + square * tokens * tokens

    within, beyond = LearnedPeaks(), LearnedPeaks()
    for size in sorted(seen):  # what a smaller batch takes later lowers what is kept of a larger one of its class
        within.learn(0, size, takes(size), 0)
        beyond.learn(0, size, takes(size, 0), 0)
    if asked <= max(seen):
        found = within.of(0, asked)
        assert found is not None and found >= takes(asked) * 0.999999
        assert within.seen(0, asked)
    elif min(seen) * 1.25 <= max(seen):
        found = beyond.of(0, asked)
        assert found is not None and found >= takes(asked, 0) * 0.999999


def test_a_set_that_was_never_used_lies_between_its_neighbours() -> None:
    needs = LearnedPeaks()
    assert needs.of(1, 10) is needs.at_most(1, 10) is None
    needs.learn(0, 10, 1000, None)
    assert needs.of(1, 10) is None and needs.at_most(1, 10) == 1000
    needs.learn(2, 10, 200, None)
    assert needs.of(1, 10) == 800 and not needs.known(1)


def test_a_proof_covers_no_larger_batch_in_no_less_room() -> None:
    needs = LearnedPeaks()
    needs.learn(0, 100, 1000, 5000)
    needs.learn(0, 100, 1000, None)  # the allocator had to give its cache back
    assert needs.proven(0, 90, 5000) and not needs.proven(0, 101, 9000) and not needs.proven(0, 90, 4999)
    assert not needs.proven(1, 1, 9000)
    needs.forget_proofs()
    assert not needs.proven(0, 90, 5000)
