"""Attention and MLP children by the names that model code gives them."""

from __future__ import annotations

import pytest
from torch import nn

from autockpt.workload.units import sub_units


class MyGatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Inner(MyGatedMLP):
    pass


def roles(**children: nn.Module) -> dict[str, str]:
    block = nn.Module()
    for name, child in children.items():
        block.add_module(name, child)
    return {name: role for name, _, role in sub_units(block)}


@pytest.mark.parametrize(
    "name", ["attn", "self_attn", "attention", "self_attention", "encoder_attn", "attn1", "mha", "crossattention"]
)
def test_attention_by_name(name: str) -> None:
    assert roles(**{name: Inner()}) == {name: "attention"}


@pytest.mark.parametrize(
    "name",
    ["mlp", "ffn", "feed_forward", "ff", "feedforward", "ffwd", "block_sparse_moe", "DenseReluDense", "mlp_block"],
)
def test_mlp_by_name(name: str) -> None:
    assert roles(**{name: Inner()}) == {name: "mlp"}


def test_by_class_where_the_name_says_nothing() -> None:
    assert roles(sa=nn.MultiheadAttention(4, 2), up=MyGatedMLP()) == {"sa": "attention", "up": "mlp"}


def test_norms_projections_and_dropouts_are_neither() -> None:
    assert not roles(
        attention_norm=nn.LayerNorm(4),
        attn_dropout=nn.Dropout(),
        mlp=nn.Linear(4, 4),
        attention=nn.Identity(),
        post_attention=Inner(),
    )


def test_berts_mlp_is_two_modules() -> None:
    assert roles(intermediate=Inner(), output=Inner()) == {"intermediate": "mlp", "output": "mlp"}
    assert roles(output=Inner()) == {}


def test_only_the_outermost_counts_and_each_once() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Inner()

    shared = Inner()
    assert roles(attention=Outer(), mlp=shared, ffn=shared) == {"attention": "attention", "mlp": "mlp"}
