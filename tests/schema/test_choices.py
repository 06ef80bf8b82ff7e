from __future__ import annotations

import pytest

from autockpt.errors import PlanError
from autockpt.schema.choices import (
    CHOICE_TYPES,
    choice_kinds,
    dump_choice,
    from_label,
    head_kinds,
    label,
    legend,
    parse_choice,
    parse_choices,
)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("recompue", "unknown choice 'recompue'"),
        (3, "unknown choice 3"),
        ({"keep": ["a"]}, "unknown choice"),
        ({"kind": "selective", "kep": ["a"]}, "selective has no option 'kep'"),
        ({"kind": "recompute", "keep": ["a"]}, "recompute has no option 'keep'"),
        ({"kind": "selective", "keep": []}, "selective: keep must name at least one module"),
        ({"kind": "selective", "keep": [3]}, "selective: keep.0: "),
        ({"kind": "selective", "keep": ["mlp", ""]}, "selective: keep: must name modules"),
        ({"kind": "selective", "within": ["mlp", "mlp.up"]}, "selective: within names mlp.up and a module around it"),
        ({"kind": "remake", "within": ["fused_attention"]}, "remake: within must name modules, not fused_attention"),
        ({"kind": "remake", "within": ["**"]}, "remake: within must name modules, not **"),
        ({"kind": "segment", "size": 0}, "segment: size: "),
        ({"kind": "segment", "size": 0}, "segment: size: "),
        ({"kind": "segment", "depth": 2}, "segment has no option 'depth'"),
        ({"kind": "chunked_loss", "tokens": -1}, "chunked_loss: tokens: "),
    ],
)
def test_what_is_wrong_is_said(value, complaint):
    with pytest.raises(PlanError) as caught:
        parse_choice(value)
    assert str(caught.value.message).startswith(complaint) and caught.value.remedy


@pytest.mark.parametrize("value", [*choice_kinds(), {"kind": "selective", "keep": ["mlp.up", "fused_attention"]}])
def test_round_trips(value):
    choice = parse_choice(value)
    assert parse_choice(dump_choice(choice)) == choice == from_label(label(choice))


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


def test_parts_may_run_again_with_nothing_kept_and_names_that_only_begin_alike():
    choice = parse_choice({"kind": "selective", "keep": [], "within": ["mlp_norm", "mlp"]})
    assert dump_choice(choice) == {"kind": "selective", "keep": (), "within": ("mlp", "mlp_norm")}


def test_what_is_wrong_with_one_of_many_names_the_unit():
    with pytest.raises(PlanError) as caught:
        parse_choices({"h.0": "save", "h.1": "recompte"})
    assert caught.value.message == "h.1: unknown choice 'recompte'" and "recompute?" in caught.value.remedy


def test_only_exact_choices_are_searched_for_the_head_unasked():
    assert head_kinds() == ("chunked_softmax",)


def test_one_letter_each():
    assert len({t.letter for t in CHOICE_TYPES.values()}) == len(CHOICE_TYPES)


def test_tiers_of_offload() -> None:
    disk = parse_choice({"kind": "offload", "tier": "disk"})
    assert str(disk) == "offload (tier disk)" and dump_choice(disk) == {"kind": "offload", "tier": "disk"}
    assert dump_choice(parse_choice({"kind": "recompute_offload", "tier": "cpu"})) == "recompute_offload"
    with pytest.raises(PlanError, match="tier") as caught:
        parse_choice({"kind": "offload", "tier": "tape"})
    assert "tier" in caught.value.remedy


def test_every_kind_of_choice_says_what_it_does() -> None:
    assert len({t.says for t in CHOICE_TYPES.values()}) == len(CHOICE_TYPES)


def test_a_legend_explains_the_kinds_and_options_that_occur() -> None:
    texts = ["save", "offload", {"kind": "remake", "within": ["mlp"]}, {"kind": "remake", "keep": ["up"]}, "offload"]
    remake, offload = CHOICE_TYPES["remake"], CHOICE_TYPES["offload"]
    save, remade, offloaded = legend(map(parse_choice, texts))
    assert save.startswith("save: ") and offloaded == f"offload: {offload.says}"
    assert remade.startswith(f"remake: {remake.says}; keep: ") and "; within: " in remade
