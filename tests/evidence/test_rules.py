from __future__ import annotations

import pytest

from autockpt.analysis import explain
from autockpt.analysis.explain import ExplainRequest
from autockpt.schema import SearchSpace, WorkloadSpec
from autockpt.shipped import load_hardware
from tests.evidence.rules.claims import COMMON
from tests.evidence.rules.plans import FULL, rules
from tests.evidence.rules.rule import Rule, Rules

pytestmark = pytest.mark.slow
BOTH = {"activations": (0.6, 0.8), "time": (0.2, 0.4)}


@pytest.mark.parametrize(
    ("promised", "found", "misses"),
    [
        (BOTH, {}, None),
        (BOTH, {"activations": 0.7, "time": 0.4}, ()),
        (BOTH, {"activations": 0.5, "time": 0.5}, ("saves less", "takes longer")),
        (BOTH, {"activations": 0.9}, ()),
        ({"forwards": (3.8, 4.2)}, {"forwards": 4.1}, ()),
        ({"forwards": (3.8, 4.2)}, {"forwards": 3.5}, ("less work",)),
        ({"times": (2.0, 3.0)}, {"times": 2.5}, ()),
        ({"times": (2.0, 3.0)}, {"times": 4}, ("more",)),
        ({"times": (2.0, 3.0)}, {"times": 1}, ("less",)),
    ],
)
def test_a_rule_says_what_it_misses(promised, found, misses) -> None:
    assert Rule("x", COMMON, "z", promised, found).misses() == misses


@pytest.fixture(scope="module")
def found() -> Rules:
    """Of a model whose eager attention keeps its scores. Few choices on the menu: the rules do not depend on them."""
    eager = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=256, attn="eager", dtype="bf16")
    few = SearchSpace().restricted(("save", "recompute", "offload"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "SearchSpace", lambda: few)
        return rules(ExplainRequest(eager, hardware=load_hardware("rtx4090")))


def test_the_rules_on_a_real_model(found: Rules) -> None:
    plain = next(r for r in found.rules if r.name == "plain step")
    full = next(r for r in found.rules if r.name == FULL and "forwards" in r.promised)
    lora = next(r for r in found.rules if r.name.startswith("recompute all, LoRA"))
    assert plain.found["forwards"] == pytest.approx(3.0, rel=0.05), "one forward, two of backward"
    assert full.promised["forwards"] == (0.95 * 4, 1.05 * 4)
    assert plain.found["forwards"] < full.found["forwards"] < 4.1, "all but the head runs twice"
    # hidden size 64, rank 16: 4 − (1 − 2·16/64)
    assert lora.promised["forwards"] == pytest.approx((0.95 * 3.5, 1.05 * 3.5))
    assert lora.found["forwards"] < full.found["forwards"]
    of_full = [r.found for r in found.rules if r.name == FULL]
    of_peak, of_activations = (next(f[what] for f in of_full if what in f) for what in ("peak", "activations"))
    assert 0 < of_peak < of_activations < 1
    assert all(f["time"] > 0 for f in of_full if "time" in f)
    assert len({(r.name, r.says) for r in found.rules}) == len(found.rules)
    assert found.activation_bytes < found.save_all_peak


def test_claims_about_bytes_are_scaled_to_the_model(found: Rules) -> None:
    by_name = {r.name: r for r in found.rules}
    slip = by_name["one feed-forward"]
    assert "537 MB" in slip.note and slip.misses()
    assert slip.found["bytes"] == 2 * 256 * 176 * 2  # rows, tokens, width of its feed-forward, bf16
    assert slip.found["bytes"] / slip.promised["bytes"][0] == pytest.approx(0.671, abs=1e-3)
    assert by_name["scores, twice the length"].misses() == (), "eager attention keeps its scores"
    seven = next(r for r in found.rules if r.name == "activations" and "15–25 GB" in r.says)
    assert seven.promised["bytes"][1] / seven.promised["bytes"][0] == pytest.approx(25 / 15)
    assert seven.found["bytes"] == found.activation_bytes
    assert by_name["AMP and recompute all"].found.keys() == {"peak", "time"}
    assert by_name["bf16, recompute, accumulation"].misses() in ((), ("more",))
    assert by_name["best length of segments"].found
    assert {r.source.address[:8] for r in found.rules if r.source != COMMON} == {"https://"}
    bound = next(r for r in found.rules if r.says.startswith("bound by arithmetic"))
    assert bound.promised["time"] in ((0.25, 0.30), (0.40, 0.50), (0.25, 0.50))


def test_the_table_has_a_row_for_each_rule_with_its_verdict(found: Rules) -> None:
    lines = [line for line in found.table().splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(found.rules)
    for line, rule in zip(lines, found.rules, strict=True):
        assert ("; holds" in line, "**no**" in line) == (rule.misses() == (), bool(rule.misses())), line
