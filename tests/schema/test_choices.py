from __future__ import annotations

import pytest

from autockpt.errors import PlanError
from autockpt.schema.choices import CHOICE_TYPES, choice_kinds, dump_choice, from_label, label, parse_choice


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
        ({"kind": "segment", "size": 0}, "segment: size: "),
        ({"kind": "segment", "levels": 3}, "segment: levels: "),
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


def test_one_letter_each():
    assert len({t.letter for t in CHOICE_TYPES.values()}) == len(CHOICE_TYPES)


def test_tiers_of_offload() -> None:
    disk = parse_choice({"kind": "offload", "tier": "disk"})
    assert str(disk) == "offload (tier disk)" and dump_choice(disk) == {"kind": "offload", "tier": "disk"}
    assert dump_choice(parse_choice({"kind": "recompute_offload", "tier": "cpu"})) == "recompute_offload"
    with pytest.raises(PlanError, match="tier") as caught:
        parse_choice({"kind": "offload", "tier": "tape"})
    assert "tier" in caught.value.remedy
