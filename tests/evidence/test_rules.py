from __future__ import annotations

import pytest

from autockpt.analysis import explain
from autockpt.analysis.explain import ExplainRequest
from autockpt.schema import WorkloadSpec
from autockpt.shipped import load_hardware, load_space
from tests.evidence.rules.plans import FULL, forwards, rules
from tests.evidence.rules.rule import Reading, Rule, Rules, table

pytestmark = pytest.mark.slow


def test_a_rule_says_what_it_misses() -> None:
    rule = Rule(name="x", source="y", says="z", memory=(0.6, 0.8), time=(0.2, 0.4))
    assert rule.misses(None) is None and rule.misses(Reading()) is None
    assert rule.misses(Reading(activations_saved=0.7, time_added=0.4)) == ()
    assert rule.misses(Reading(activations_saved=0.5, time_added=0.5)) == ("saves less", "takes longer")
    assert rule.misses(Reading(activations_saved=0.9)) == ()
    factor = Rule(name="x", source="y", says="z", factor=4)
    assert factor.misses(Reading(factor=4.1)) == () and factor.misses(Reading(factor=3.5)) == ("less work",)
    rule = Rule(name="x", source="y", says="z", amount=(2.0, 3.0))
    assert rule.misses(Reading(amount=2.5)) == () and rule.misses(Reading(amount=4)) == ("more",)
    assert rule.misses(Reading(amount=1)) == ("less",)


@pytest.fixture(scope="module")
def found() -> Rules:
    """Of a model whose eager attention keeps its scores. Few choices on the menu: the rules do not depend on them."""
    eager = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=256, attn="eager", dtype="bf16")
    few = load_space(explain.SPACE).restricted(("save", "recompute", "offload"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "load_space", lambda name: few)
        return rules(ExplainRequest(eager, hardware=load_hardware("rtx4090")))


def test_the_rules_on_a_real_model(found: Rules) -> None:
    by_name = {(r.name, r.says): r for r in found.rules}
    plain = next(r for r in found.rules if r.name == "plain step")
    full = next(r for r in found.rules if r.name == FULL and r.factor)
    lora = next(r for r in found.rules if r.name.startswith("recompute all, LoRA"))
    assert plain.predicted and plain.predicted.factor == pytest.approx(3.0, rel=0.05), "one forward, two of backward"
    assert full.factor == 4 and full.predicted and full.predicted.factor
    assert plain.predicted.factor is not None and plain.predicted.factor < full.predicted.factor < 4.1, (
        "all but the head runs twice"
    )
    # hidden size 64, rank 16: 4 − (1 − 2·16/64)
    assert lora.factor == pytest.approx(3.5) and lora.predicted and lora.predicted.factor
    assert lora.predicted.factor < full.predicted.factor
    memory = next(r for r in found.rules if r.name == FULL and r.of == "activations" and r.memory)
    assert memory.predicted and memory.predicted.peak_saved and memory.predicted.activations_saved
    assert 0 < memory.predicted.peak_saved < memory.predicted.activations_saved < 1
    assert memory.predicted.time_added and memory.predicted.time_added > 0
    assert len(by_name) == len(found.rules)
    assert found.activation_bytes < found.save_all_peak


def test_claims_about_bytes_are_scaled_to_the_model(found: Rules) -> None:
    by_name: dict[str, Rule] = {r.name: r for r in found.rules if r.amount or r.name.startswith("AMP")}
    slip = by_name["one feed-forward"]
    assert slip.predicted and slip.amount and "537 MB" in slip.note
    assert slip.predicted.amount == 2 * 256 * 176 * 2  # rows, tokens, width of its feed-forward, bf16
    assert slip.predicted.amount / slip.amount[0] == pytest.approx(0.671, abs=1e-3) and slip.misses(slip.predicted)
    scores = by_name["scores, twice the length"]
    assert scores.misses(scores.predicted) == (), "eager attention keeps its scores"
    seven = next(r for r in found.rules if r.name == "activations" and "15–25 GB" in r.says)
    assert seven.amount and seven.amount[1] / seven.amount[0] == pytest.approx(25 / 15)
    assert seven.predicted and seven.predicted.amount == found.activation_bytes
    mixed, card = by_name["AMP and recompute all"].predicted, by_name["bf16, recompute, accumulation"]
    assert mixed and mixed.peak_saved and mixed.time_added is not None
    assert card.predicted and card.amount and card.misses(card.predicted) in ((), ("more",))
    assert by_name["best length of segments"].predicted
    assert {r.address[:8] for r in found.rules if r.source != "common advice"} == {"https://"}
    bound = next(r for r in found.rules if r.says.startswith("bound by arithmetic"))
    assert bound.time in ((0.25, 0.30), (0.40, 0.50), (0.25, 0.50))


def test_the_table_has_a_row_for_each_rule_with_its_verdict(found: Rules) -> None:
    lines = [line for line in table(found).splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(found.rules)
    for line, rule in zip(lines, found.rules, strict=True):
        misses = rule.misses(rule.predicted)
        assert ("; holds" in line, "**no**" in line) == (misses == (), bool(misses)), line


def test_flops_of_nothing() -> None:
    from tests.samples import small_graph

    graph = small_graph()
    assert forwards(graph, graph) == pytest.approx(230 / 110)
    empty = graph.model_copy(update={"ops": ()})
    assert forwards(empty, empty) is None
