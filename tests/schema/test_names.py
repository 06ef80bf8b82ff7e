from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autockpt.errors import PlanError
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice
from autockpt.schema.names import (
    Entry,
    align,
    check_nesting,
    expand,
    fold,
    listing,
    outermost,
    parse_pattern,
    strip_prefixes,
)

LAYERS = [f"model.layers.{i}" for i in range(12)]
UNITS = [n for layer in LAYERS for n in (layer, f"{layer}.self_attn", f"{layer}.mlp")]


def owners(patterns: list[str], names: list[str]) -> dict[str, str]:
    return {name: entry.pattern for name, entry in expand([Entry(p, p) for p in patterns], names).items()}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.3", 1),
        ("model.layers.0-11", 12),
        ("model.layers.10-11", 2),
        ("model.layers.*", 12),
        ("model.layers.*.mlp", 12),
        ("model.layers.0-3.mlp", 4),
        ("**.mlp", 12),
        ("**", 12),
        ("**.0-11", 12),
        ("model.**.self_attn", 12),
        ("*.*.0-1.*", 4),
        ("base_model.model.model.layers.0-11", 12),
        ("module._orig_mod.model.layers.*.mlp", 12),
    ],
)
def test_patterns_name_units(pattern: str, count: int) -> None:
    assert len(owners([pattern], UNITS)) == count


def test_double_star_stands_for_none_too_and_means_the_outermost() -> None:
    assert list(owners(["model.**.layers.0"], UNITS)) == ["model.layers.0"]
    assert list(owners(["**"], UNITS)) == LAYERS


def test_star_is_one_component_and_ranges_are_numbers() -> None:
    assert not parse_pattern("model.*").select(["model.layers.0"])
    assert parse_pattern("h.2-11").select(["h.x", "h.02", "h.10"]) == ["h.10"]


def test_an_exact_name_wins_over_what_it_looks_like() -> None:
    assert owners(["h.0-1"], ["h.0-1", "h.0", "h.1"]) == {"h.0-1": "h.0-1"}


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a.", "layer*", "a.**b", "a.5-3", "a.00-11", "a. b"])
def test_malformed_patterns_are_errors(pattern: str) -> None:
    with pytest.raises(PlanError):
        parse_pattern(pattern)


def test_a_unit_named_twice_names_both_lines() -> None:
    entries = [Entry("model.layers.0-3", 1, "plan.yaml:3"), Entry("model.layers.3", 2, "plan.yaml:7")]
    with pytest.raises(PlanError) as caught:
        expand(entries, UNITS)
    assert "plan.yaml:3" in caught.value.message and "plan.yaml:7" in caught.value.message
    assert "model.layers.3" in caught.value.message


def test_a_pattern_that_matches_nothing_suggests_one() -> None:
    with pytest.raises(PlanError) as caught:
        expand([Entry("model.layer.0-11", 1, "plan.yaml:9")], UNITS)
    assert caught.value.message.startswith("plan.yaml:9: ")
    assert "model.layers.0-11" in caught.value.remedy
    with pytest.raises(PlanError) as caught:
        expand([Entry("lm_hed", 1)], UNITS, ["lm_head"])
    assert "lm_head" in caught.value.remedy


@pytest.mark.parametrize("pattern", ["model.layers.0-31", "**.layers.0-31", "model.layers.10-12.mlp"])
def test_a_range_past_the_end_is_an_error(pattern: str) -> None:
    with pytest.raises(PlanError, match="12"):
        expand([Entry(pattern, 1)], UNITS)


def test_a_huge_range_is_refused_quickly() -> None:
    with pytest.raises(PlanError):
        expand([Entry("model.layers.0-99999999999", 1)], UNITS)
    with pytest.raises(PlanError):
        parse_pattern("model.layers.0-99999999999").enumerate()
    with pytest.raises(PlanError, match="too many"):
        parse_pattern(f"model.layers.0-{10**30}").enumerate()


def test_as_many_names_as_are_allowed_are_enumerated() -> None:
    assert len(parse_pattern("h.0-9.0-9999").enumerate()) == 100_000


def test_runs_are_folded() -> None:
    assignment: dict[str, Choice] = {n: SAVE if i < 4 else RECOMPUTE for i, n in enumerate(LAYERS)}
    assert fold(assignment) == {"model.layers.0-3": SAVE, "model.layers.4-11": RECOMPUTE}
    assert list(fold({"h.0": 1, "norm": 1, "h.1": 1})) == ["h.0-1", "norm"], "in the order of their first names"


def test_folding_sees_indices_in_the_middle_and_twice() -> None:
    names = [f"layers.{i}.experts.{j}" for i in range(3) for j in range(4)]
    assert fold(dict.fromkeys(names, 1)) == {"layers.0-2.experts.0-3": 1}
    assert list(fold({u: u.rsplit(".", 1)[-1] for u in UNITS if not u[-1].isdigit()})) == [
        "model.layers.0-11.self_attn",
        "model.layers.0-11.mlp",
    ]


component = st.sampled_from(["model", "h", "mlp", "0", "1", "2", "3", "10", "11", "01", "0-1", "*", "a*b"])
name = st.lists(component, min_size=1, max_size=4).map(".".join)


@pytest.mark.slow
@given(st.dictionaries(name, st.integers(0, 2), max_size=25))
@example({"h.0-1": 0, "h.0": 1, "h.1": 1})
def test_folding_round_trips(assignment: dict[str, int]) -> None:
    found = expand([Entry(p, v) for p, v in fold(assignment).items()], assignment)
    assert {n: e.value for n, e in found.items()} == assignment


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_fold_of_layers_has_a_line_per_run(values: list[int]) -> None:
    folded = fold({f"h.{i}": v for i, v in enumerate(values)})
    assert len(folded) == 1 + sum(a != b for a, b in pairwise(values))


@given(st.text(max_size=12), st.lists(name, max_size=5))
def test_any_text_is_a_pattern_or_a_plan_error(text: str, names: list[str]) -> None:
    try:
        expand([Entry(text, 0)], names)
    except PlanError as error:
        assert error.message


def test_nested_choices_need_an_outer_save() -> None:
    check_nesting({"h.0": SAVE, "h.0.mlp": RECOMPUTE, "h.1": RECOMPUTE, "h.10": OFFLOAD})
    with pytest.raises(PlanError, match=r"inside h\.0"):
        check_nesting({"h.0": RECOMPUTE, "h.0.mlp": SAVE})
    with pytest.raises(PlanError, match=r"inside h\.0"):
        check_nesting({"h.0": RECOMPUTE, "h.0.mlp.up": SAVE})
    outer: Entry[Choice] = Entry("h.*", RECOMPUTE, "plan.yaml:3")
    inner: Entry[Choice] = Entry("h.1.mlp", SAVE, "plan.yaml:4")
    entries = expand([outer, inner], ["h.1", "h.1.mlp"])
    with pytest.raises(PlanError) as caught:
        check_nesting(entries)
    assert "plan.yaml:3" in caught.value.message and "plan.yaml:4" in caught.value.message


@pytest.mark.parametrize(
    ("wrapped", "bare"),
    [
        ("model.layers.0", "model.layers.0"),
        ("base_model.model.model.layers.0", "model.layers.0"),
        ("_orig_mod.model.layers.0", "model.layers.0"),
        ("module._orig_mod.model.layers.0", "model.layers.0"),
        ("module.base_model.model.h.0", "h.0"),
        ("model.layers.0._orig_mod.mlp", "model.layers.0.mlp"),
        ("_fsdp_wrapped_module.h.0._checkpoint_wrapped_module", "h.0"),
        ("_forward_module.model.h.0", "model.h.0"),
        ("encoder.module.0", "encoder.module.0"),
        ("base_model.encoder.0", "base_model.encoder.0"),
        ("_module.layers.0", "layers.0"),
        ("module", ""),
        ("", ""),
    ],
)
def test_wrapper_prefixes_are_stripped(wrapped: str, bare: str) -> None:
    assert strip_prefixes(wrapped) == bare
    assert strip_prefixes(bare) == bare


def test_lightning_names_are_seen_through_only_where_nothing_else_matches() -> None:
    held = [f"model.{n}" for n in LAYERS]
    assert align(["model.layers.0-11"], held)["model.layers.3"] == "model.model.layers.3"
    assert align(["model.layers.0-11"], LAYERS)["model.layers.3"] == "model.layers.3"
    assert align(["model.model.layers.0-11"], LAYERS)["model.model.layers.3"] == "model.layers.3"
    assert align(["nothing"], LAYERS)["model.layers.3"] == "model.layers.3"


@pytest.mark.parametrize("front", ["", "module."])
def test_names_are_seen_through_prompt_tuning_head_included(front: str) -> None:
    names = [f"{front}base_model.lm_head", f"{front}base_model.model.layers.0"]
    view = align(["lm_head", "model.layers.*"], names)
    assert view == {"lm_head": names[0], "model.layers.0": names[1]}


def test_listing_is_short() -> None:
    assert listing(["my-net.h.0", "my-net.h.1"]) == "my-net.h.0-1"
    assert listing(LAYERS) == "model.layers.0-11"
    assert listing([f"x{i}" for i in range(9)], 3) == "x0, x1, x2, … (6 more)"
    assert listing([f"x{i}" for i in range(3)], 3) == "x0, x1, x2"
    assert outermost(UNITS) == LAYERS
