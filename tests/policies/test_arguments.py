from __future__ import annotations

import operator
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from autockpt.policies.arguments import hidden_tensors, put_together, take_apart

Pair = namedtuple("Pair", "a b")


def leaves() -> st.SearchStrategy:
    return st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just("tensor"), st.just(torch.float32)
    )


trees = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=12,
)


def with_tensors(tree):
    if tree == "tensor":
        return torch.rand(2)
    if isinstance(tree, Pair):
        return Pair(*map(with_tensors, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(with_tensors, tree))
    if isinstance(tree, dict):
        return type(tree)((k, with_tensors(v)) for k, v in tree.items())
    return tree


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.slow
@given(trees)
def test_round_trip(tree):
    value = with_tensors(tree)
    tensors: list[torch.Tensor] = []
    template = take_apart(value, tensors, [])
    assert same(put_together(template, iter(tensors)), value)


def test_objects_of_own_classes_are_made_again_once_each_with_tensors_as_inputs():
    @dataclass
    class State:
        hidden: torch.Tensor
        blocks: dict
        self: State | None = None

    class Slotted:
        __slots__ = ("state", "unset")

    state, slotted = State(torch.rand(2), {"rows": [torch.rand(1)]}), Slotted()
    state.self = slotted.state = state
    module, tensors, objects = torch.nn.Linear(1, 1), [], []
    value = (BaseModelOutput(last_hidden_state=torch.rand(1)), {"state": state, "module": module}, slotted)
    again = put_together(take_apart(value, tensors, objects), iter(tensors))
    assert len(tensors) == 3 and objects == [module] and again[1]["module"] is module
    assert isinstance(again[0], BaseModelOutput) and again[0].last_hidden_state is tensors[0]
    twin = again[1]["state"]
    assert twin is not state and twin.self is twin and again[2].state is twin and not hasattr(again[2], "unset")
    assert twin.hidden is state.hidden and twin.blocks["rows"] is not state.blocks["rows"]


def test_objects_that_cannot_be_made_again_by_their_attributes_stay():
    class Closing:
        def __del__(self) -> None: ...

    class Numbers(list): ...

    class Made:
        def __new__(cls, *_: int) -> Made:
            return super().__new__(cls)

    values = [Closing(), Numbers([torch.ones(1)]), Made(1), torch.Generator(), iter([1]), Path("a")]
    objects: list = []
    again = put_together(take_apart(values, [], objects), iter(()))
    assert all(map(operator.is_, again, values)) and len(objects) == len(values)
    assert len(list(hidden_tensors(objects))) == 1


def test_what_is_given_twice_is_made_again_once_and_circles_end():
    shared: list = [torch.rand(2)]
    state: dict = {"items": shared, "own": [1]}
    state["itself"] = state
    shared.append(shared)
    tensors: list = []
    template = take_apart(((shared, state), {"items": shared}), tensors, [])
    (items, again), named = put_together(template, iter(tensors))
    assert len(tensors) == 1 and items[0] is tensors[0]
    assert items is again["items"] is named["items"] is items[1] and items is not shared
    assert again["itself"] is again and again["own"] == [1] and again is not state
