"""What a call is given is taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from autockpt.checkpointing import arguments
from autockpt.checkpointing.arguments import flatten, unflatten

Pair = namedtuple("Pair", "first second")


def again(value: Any) -> tuple[Any, list[Tensor]]:
    tensors: list[Tensor] = []
    template = flatten(value, tensors, [])
    return unflatten(template, [tensor * 2 for tensor in tensors]), tensors


def test_containers_are_new_and_hold_the_given_tensors():
    x, notes = torch.ones(2), [1, None]
    value = {"pair": Pair(x, 3), "ordered": OrderedDict(a=[x + 1]), "notes": notes, "text": ("a", 2.0)}
    made, tensors = again(value)
    assert len(tensors) == 2 and made["pair"].first.tolist() == [2, 2] and made["pair"].second == 3
    assert type(made["ordered"]) is OrderedDict and made["ordered"]["a"][0].tolist() == [4, 4]
    assert made["notes"] == notes and made["notes"] is not notes and made["text"] == ("a", 2.0)


def test_a_tensor_that_is_given_twice_stays_one():
    x = torch.ones(2)
    (query, key, value), tensors = again((x, x, torch.ones(2)))
    assert query is key and value is not key and len(tensors) == 2


def test_generators_are_listed_and_other_objects_pass():
    generator, thing, found = torch.Generator(), object(), []
    assert flatten((generator, thing), [], found) == (generator, thing) and found == [generator]


@pytest.mark.parametrize("save", [arguments.save, arguments.HeldByNode])
def test_inputs_are_held_as_autograd_holds_saved_tensors(save):
    leaf = torch.ones(3, requires_grad=True)
    x, packed = leaf * 2, []
    held = save(x)
    assert torch.equal(held.unpack(), x) and torch.equal(held.unpack(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.unpack()
    given = torch.rand(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or 0, lambda _: packed[0]):
        held = save(given)
    assert len(packed) == 1 and torch.equal(held.unpack(), given)
