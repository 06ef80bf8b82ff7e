"""Copies of nested values, and what tells that a value has changed since it was copied."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.mutable import copied, differ, is_mutable, tensors_in, without_graphs

plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.builds(torch.zeros, st.integers(0, 3))
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=8,
)


def containers(value: Any) -> list[Any]:
    """``value`` and all containers in it."""
    if not isinstance(value, (list, dict, deque)):
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [value, *(found for part in parts for found in containers(part))]


def change(container: Any) -> None:
    if isinstance(container, dict):
        container["a new one"] = None
    else:
        container.append(None)


@given(nested, st.booleans())
def test_a_copy_holds_the_same_until_something_changes(value, clones):
    for i in range(len(containers(value))):
        before = copied(value, clones=clones)
        assert not differ(before, value)
        change(containers(value)[i])
        assert differ(before, value)


@given(nested)
def test_a_copy_shares_nothing_that_could_change(value):
    before, sizes = copied(value, clones=True), [len(c) for c in containers(value)]
    for container in containers(before):
        change(container)
    assert [len(c) for c in containers(value)] == sizes
    assert not {id(c) for c in containers(value)} & {id(c) for c in containers(before)}
    memory = [{t.data_ptr() for t in tensors_in(v) if t.numel()} for v in (value, before)]
    assert not memory[0] & memory[1]


@given(nested)
def test_without_clones_tensors_stay_themselves(value):
    pairs = zip(tensors_in(value), tensors_in(copied(value, clones=False)), strict=True)
    assert all(a is b for a, b in pairs)


def draw_torch(generator: torch.Generator) -> None:
    torch.rand(1, generator=generator)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (torch.Generator, draw_torch),
        (random.Random, lambda generator: generator.random()),
        (np.random.default_rng, lambda generator: generator.random()),
    ],
    ids=["torch", "random", "numpy"],
)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [value]}], ids=["itself", "in a list"])
def test_generators_differ_by_their_state(make, draw, wrap):
    generator = make()
    value = wrap(generator)
    before = copied(value, clones=False)
    assert is_mutable(value) and not differ(before, value)
    draw(generator)
    assert differ(before, value)


def test_kinds_and_defaults_of_containers_are_kept():
    value = [OrderedDict(b=[1], a=2), defaultdict(list, {"x": [3]}), deque([[4], 5], maxlen=2)]
    twin = copied(value, clones=False)
    assert [type(part) for part in twin] == [OrderedDict, defaultdict, deque]
    assert twin == value and twin[1]["new"] == [] and twin[2].maxlen == 2 and "new" not in value[1]


def test_a_container_in_itself_comes_to_an_end():
    value: list[Any] = [torch.zeros(1)]
    value.append(value)
    before = copied(value, clones=True)
    assert not differ(before, value)
    value.append(None)
    assert differ(before, value) and len(list(tensors_in(value))) < 100


def test_graphs_are_let_go_of_and_needing_gradients_is_kept():
    leaf = torch.ones(2, requires_grad=True)
    value = {"a": [leaf * 2, leaf], "b": leaf.exp()}
    free = without_graphs(copied(value, clones=False))
    assert [t.grad_fn for t in tensors_in(free)] == [None] * 3 and all(t.requires_grad for t in tensors_in(free))
    assert free["a"][1] is leaf and value["a"][0].grad_fn is not None and value["b"].grad_fn is not None
    assert torch.equal(free["b"], value["b"])
