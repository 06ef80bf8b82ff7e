"""Finding tensors wherever they hide, and counting each storage once."""

from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from autockpt.workload import move, nested_tensors
from autockpt.workload.storages import storage_bytes


def bytes_of(*roots: Any) -> int:
    return storage_bytes(nested_tensors(*roots))


def test_tensors_inside_tensor_subclasses_count() -> None:
    assert bytes_of({"pair": TwoTensor(torch.zeros(4), torch.zeros(4))}) == 2 * 16


def test_a_quantised_weights_state_counts() -> None:
    weight = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    nested = SimpleNamespace(absmax=torch.zeros(2), state2=None)
    weight.quant_state = SimpleNamespace(absmax=torch.zeros(4, dtype=torch.uint8), state2=nested)  # type: ignore[attr-defined]
    module = nn.Module()
    module.weight = weight
    assert bytes_of(module) == 8 + 4 + 8


trees = st.recursive(
    st.integers(0, 20) | st.none() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(trees)
def test_any_nesting_is_searched_whole(tree: Any) -> None:
    total = 0

    def grow(node: Any) -> Any:
        nonlocal total
        if isinstance(node, int):
            total += 4 * node
            return torch.zeros(node)
        if isinstance(node, list):
            return tuple(grow(n) for n in node)
        return {k: grow(n) for k, n in node.items()} if isinstance(node, dict) else node

    grown = grow(tree)
    assert bytes_of(grown) == total


def test_moving_keeps_the_nesting() -> None:
    Pair = namedtuple("Pair", "a b")
    batch = OrderedDict(x=[torch.ones(1), "text"], y=(Pair(torch.ones(2), None),), z=UserDict(q=torch.ones(3)))
    moved = move(batch, torch.device("meta"))
    assert type(moved) is OrderedDict and type(moved["y"][0]) is Pair and type(moved["z"]) is UserDict
    assert {moved["x"][0].device.type, moved["y"][0].a.device.type, moved["z"]["q"].device.type} == {"meta"}
    assert moved["x"][1] == "text" and moved["y"][0].b is None
