import pytest

from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, SAVE, Choice, parse_choice
from tests.policies.zoo import CASES, Case, in_turn
from tests.reruns import RunCounter

# least and most of a unit's heavy ops that backward executes again, as shares; recomputing stops once all is there
RANGES = dict.fromkeys(("save", "offload", "compile_budget"), (0, 0)) | {
    **dict.fromkeys(("recompute", "recompute_offload", "segment"), (0.5, 1)),
    "keep_attention": (0.3, 1),
    **dict.fromkeys(("selective", "remake"), (0, 1)),
}


def count(case: Case, choices: dict[str, Choice]) -> RunCounter:
    model = case.make()
    counter = RunCounter(model, choices)
    with attach(model, choices) as session:
        extra = {"use_cache": False} if case.takes_cache else {}
        with counter.counting():
            case.step(model, case.batch(), **extra).backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert (session.host_bytes > 0) == any("offload" in choice.kind for choice in choices.values())
    return counter


@pytest.mark.slow
@in_turn(CASES.values(), 3)
def test_every_policy_executes_again_what_it_says(kind: str, case: Case) -> None:
    counter = count(case, case.choices(case.make(), parse_choice(kind)))
    least, most = RANGES[kind]
    for runs in counter.counts.values():
        assert runs["forward"] > 0
        # with one op in a unit there is nothing left to run again
        assert min(int(least * runs["forward"]), runs["forward"] - 1) <= runs["again"] <= most * runs["forward"]


def test_sub_units_count_for_themselves() -> None:
    counts = count(CASES["llama"], {"model.layers.0": SAVE, "model.layers.0.mlp": RECOMPUTE}).counts
    assert (counts["model.layers.0"]["forward"], counts["model.layers.0"]["again"]) == (6, 0)
    assert counts["model.layers.0.mlp"]["forward"] == 3 and counts["model.layers.0.mlp"]["again"] >= 2
