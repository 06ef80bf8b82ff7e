import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autockpt.errors import PlanError
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice
from autockpt.schema.names import Entry, align, check_nesting, expand, fold, parse_pattern, strip_prefixes

LAYERS = [f"model.layers.{i}" for i in range(12)]
UNITS = [n for layer in LAYERS for n in (layer, f"{layer}.self_attn", f"{layer}.mlp")]


def owners(patterns: list[str], names: list[str]) -> dict[str, str]:
    return {name: entry.pattern for name, entry in expand([Entry(p, p) for p in patterns], names).items()}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.3", 1),
        ("model.layers.0-11", 12),
        ("model.layers.*", 12),
        ("model.layers.0-3.mlp", 4),
        ("**.mlp", 12),
        ("**.0-11", 12),
        ("model.**.self_attn", 12),
        ("*.*.0-1.*", 4),
        ("base_model.model.model.layers.0-11", 12),
        ("module._orig_mod.model.layers.*.mlp", 12),
    ],
)
def test_patterns_name_units(pattern: str, count: int) -> None:
    assert len(owners([pattern], UNITS)) == count


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a.", "layer*", "a.**b", "a.5-3", "a.00-11", "a. b"])
def test_malformed_patterns_are_errors(pattern: str) -> None:
    with pytest.raises(PlanError):
        parse_pattern(pattern)


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
    with pytest.raises(PlanError):
        expand([Entry(pattern, 1)], UNITS)


component = st.sampled_from(["model", "h", "mlp", "0", "1", "2", "3", "10", "11", "01", "0-1", "*", "a*b"])
name = st.lists(component, min_size=1, max_size=4).map(".".join)


@pytest.mark.slow
@given(st.dictionaries(name, st.integers(0, 2), max_size=25))
@example({"h.0-1": 0, "h.0": 1, "h.1": 1})
def test_folding_round_trips(assignment: dict[str, int]) -> None:
    found = expand([Entry(p, v) for p, v in fold(assignment).items()], assignment)
    assert {n: e.value for n, e in found.items()} == assignment


@given(st.text(max_size=12), st.lists(name, max_size=5))
def test_any_text_is_a_pattern_or_a_plan_error(text: str, names: list[str]) -> None:
    try:
        expand([Entry(text, 0)], names)
    except PlanError as error:
        assert error.message


def test_nested_choices_need_an_outer_save() -> None:
    check_nesting({"h.0": SAVE, "h.0.mlp": RECOMPUTE, "h.1": RECOMPUTE, "h.10": OFFLOAD})
    with pytest.raises(PlanError):
        check_nesting({"h.0": RECOMPUTE, "h.0.mlp": SAVE})
    with pytest.raises(PlanError):
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
        ("module._orig_mod.model.layers.0", "model.layers.0"),
        ("module.base_model.model.h.0", "h.0"),
        ("model.layers.0._orig_mod.mlp", "model.layers.0.mlp"),
        ("_fsdp_wrapped_module.h.0._checkpoint_wrapped_module", "h.0"),
        ("encoder.module.0", "encoder.module.0"),
        ("base_model.encoder.0", "base_model.encoder.0"),
        ("module", ""),
    ],
)
def test_wrapper_prefixes_are_stripped(wrapped: str, bare: str) -> None:
    assert strip_prefixes(wrapped) == bare
    assert strip_prefixes(bare) == bare


def test_lightning_prefixes_are_dropped_where_nothing_matches() -> None:
    held = [f"model.{n}" for n in LAYERS]
    assert align(["model.layers.0-11"], held)["model.layers.3"] == "model.model.layers.3"
    assert align(["model.layers.0-11"], LAYERS)["model.layers.3"] == "model.layers.3"
    assert align(["model.model.layers.0-11"], LAYERS)["model.model.layers.3"] == "model.layers.3"
    assert align(["nothing"], LAYERS)["model.layers.3"] == "model.layers.3"
