import pytest

from autockpt.errors import PlanError, UsageError
from autockpt.schema import SearchSpace
from autockpt.schema.choices import choice_kinds, dump_choice, parse_choice, searched_kinds

WRONG = [
    "recompue",
    3,
    {"keep": ["a"]},
    {"kind": "recompute", "keep": ["a"]},
    {"kind": "selective", "keep": []},
    {"kind": "selective", "keep": ["mlp", ""]},
    {"kind": "selective", "within": ["mlp", "mlp.up"]},
    {"kind": "remake", "within": ["**"]},
    {"kind": "segment", "size": 0},
    {"kind": "chunked_loss", "tokens": -1},
    {"kind": "offload", "tier": "tape"},
]


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_what_is_wrong_is_refused(value):
    with pytest.raises(PlanError) as caught:
        parse_choice(value)
    assert caught.value.remedy


PARTS, GATHERED = {"kind": "selective", "keep": ["mlp.up", "fused_attention"]}, {"kind": "save", "gathered": True}


@pytest.mark.parametrize("value", [*choice_kinds(), PARTS, GATHERED])
def test_round_trips(value):
    choice = parse_choice(value)
    assert parse_choice(dump_choice(choice)) == choice


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"keep": "mlp"}, {"keep": ["mlp"]}),
        ({"keep": ["mlp", "attn", "mlp"]}, {"keep": ["attn", "mlp"]}),
        ({"keep": ["mlp", "**"]}, {}),
    ],
)
def test_parts_that_mean_the_same_are_one_choice(one, other):
    assert parse_choice({"kind": "selective", **one}) == parse_choice({"kind": "selective", **other})


def test_tiers_of_offload() -> None:
    disk = parse_choice({"kind": "offload", "tier": "disk"})
    assert str(disk) == "offload (tier disk)" and dump_choice(disk) == {"kind": "offload", "tier": "disk"}
    assert dump_choice(parse_choice({"kind": "recompute_offload", "tier": "cpu"})) == "recompute_offload"


def test_all_searched_choices_are_tried_unless_restricted() -> None:
    assert SearchSpace().choices == searched_kinds()
    few = SearchSpace(choices=("save", "recompute"), head=(), gathered=False)
    assert SearchSpace().restricted(("recompute",)) == few
    assert SearchSpace().restricted(("recompute", "gathered")) == few.model_copy(update={"gathered": True})
    less = SearchSpace().without(("recompute",))
    assert less.choices == tuple(k for k in searched_kinds() if k != "recompute") and less.gathered


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("recompte", "Did you mean recompute?"),
        ("save", "Allow recompute"),
        ("chunked_loss", "--allow-inexact"),
        ("compile_budget", "--compile"),
    ],
)
def test_what_cannot_be_searched_is_refused(kind: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        SearchSpace().restricted((kind,))
    assert remedy in refused.value.remedy
