"""Two units share a kind exactly when their ops cost the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autockpt.workload.units import structure_key


def layer(**attributes: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def same(a: nn.Module, b: nn.Module) -> bool:
    return structure_key(a) == structure_key(b)


def test_equal_layers_are_the_same_wherever_they_stand() -> None:
    assert same(layer(layer_idx=0, layer_id=0, layer_number=1), layer(layer_idx=5, layer_id=5, layer_number=6))
    assert same(layer(name="layers.1.attn"), layer(name="layers.12.attn"))


def test_weights_that_differ_in_shape_type_or_training_differ() -> None:
    assert not same(nn.Linear(4, 4), nn.Linear(4, 5))
    assert not same(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    assert not same(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    assert not same(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def test_settings_that_change_ops_differ() -> None:
    assert not same(layer(sliding_window=16), layer(sliding_window=None))
    assert not same(layer(kind="full"), layer(kind="sliding"))
    assert not same(nn.Conv2d(4, 4, 1, stride=1), nn.Conv2d(4, 4, 1, stride=2))


def test_what_the_config_says_about_this_layer_matters() -> None:
    config = SimpleNamespace(num_hidden_layers=3, layer_types=["sliding", "full", "sliding"])
    a, b, c = (layer(layer_idx=i, config=config) for i in range(3))
    assert same(a, c) and not same(a, b)
