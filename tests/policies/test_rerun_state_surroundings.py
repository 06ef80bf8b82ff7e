from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.rerun_state import surroundings
from autockpt.policies.rerun_state.surroundings import numpy_words, put_python, python_state

DRAWS = (random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(70), lambda: random.shuffle([1, 2, 3]))


@given(st.integers(0, 2**32), st.lists(st.sampled_from(DRAWS), max_size=8), st.integers(0, 700))
def test_pythons_state_is_what_getstate_says(seed, draws, more):
    """Any draw changes it, the left-over normal number included; putting it back repeats the numbers."""
    random.seed(seed)
    for _ in range(more):
        random.random()
    before = random.getstate()
    state = python_state()
    for draw in draws:
        was = python_state()
        draw()
        assert python_state() != was
    drawn = [random.random(), random.gauss(0, 1), random.gauss(0, 1)]
    put_python(state)
    assert random.getstate() == before and python_state() == state
    for draw in draws:
        draw()
    assert [random.random(), random.gauss(0, 1), random.gauss(0, 1)] == drawn


def test_without_the_quick_way_the_state_is_the_same(monkeypatch):
    random.seed(3)
    random.gauss(0, 1)
    quick = python_state()
    monkeypatch.setattr(surroundings, "_python_words", lambda: None)
    slow, drawn = python_state(), random.random()
    for state in (quick, slow):
        put_python(state)
        assert python_state() == slow and random.random() == drawn


def test_draws_from_numpy_are_seen():
    np.random.seed(0)
    before = numpy_words()
    assert before == numpy_words()
    np.random.rand()
    assert numpy_words() != before
