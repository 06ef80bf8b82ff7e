"""Wrapped modules are recognised as what they wrap."""

from __future__ import annotations

import torch
from torch import nn

from autockpt.workload.names import class_name, named_units, unwrap


def test_unwrapping() -> None:
    layer = nn.Linear(1, 1)
    assert unwrap(layer) is layer
    assert unwrap(torch.compile(layer)) is layer  # type: ignore[arg-type]


def test_wrappers_and_inside_share_a_name_and_the_inside_comes_last() -> None:
    layer = nn.Linear(1, 1)
    model = nn.Sequential(torch.compile(layer))  # type: ignore[arg-type]
    assert dict(named_units(model))["0"] is layer


def test_fsdp2_renames_classes_in_place() -> None:
    class FSDPLinear(nn.Linear):
        pass

    class FSDPThing(nn.Module):
        pass

    assert class_name(FSDPLinear(1, 1)) == "Linear"
    assert class_name(FSDPThing()) == "FSDPThing"
