from __future__ import annotations

from collections import OrderedDict, namedtuple

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


@given(trees)
def test_round_trip(tree):
    value = with_tensors(tree)
    tensors: list[torch.Tensor] = []
    template = take_apart(value, tensors, [])
    assert same(put_together(template, iter(tensors)), value)


def test_containers_that_pytrees_know_and_objects_that_they_do_not():
    class Mask:
        def __init__(self) -> None:
            self.blocks = {"rows": [torch.rand(1)]}

    mask, hidden = Mask(), torch.rand(2)
    value = (BaseModelOutput(last_hidden_state=hidden), {"mask": mask, "module": torch.nn.Linear(1, 1)})
    tensors: list[torch.Tensor] = []
    objects: list = []
    again = put_together(take_apart(value, tensors, objects), iter(tensors))
    assert isinstance(again[0], BaseModelOutput)
    assert again[0].last_hidden_state is hidden
    assert again[1]["mask"] is mask
    assert [id(t) for t in hidden_tensors(objects)] == [id(mask.blocks["rows"][0])]
