"""Sets worth keeping, and parts worth running again, of real layers."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.cost.fronts import MOST_PARTS, MOST_REMADE, MOST_SETS, remake_front, selective_front
from autockpt.schema import RECOMPUTE, SAVE, Graph, WorkloadSpec
from autockpt.tracing import Tracer
from tests.tuning.small import TWO_LAYERS

pytestmark = pytest.mark.slow


def alike(graph: Graph) -> Any:
    """Op times in which every op takes as long."""
    return SimpleNamespace(seconds=dict.fromkeys(graph.signatures, 1e-5))


@pytest.mark.parametrize(("model", "part"), [(TWO_LAYERS, "mlp"), ("gpt2-tiny", "mlp"), ("vit-tiny", "mlp")])
def test_the_first_part_is_the_mlp_whose_cheap_ops_free_much(model: str, part: str) -> None:
    with Tracer.from_spec(WorkloadSpec(model=model, batch_size=2)) as tracer:
        unit = next(u for u in tracer.units if u.role == "block")
        again = tracer.trace({unit.name: RECOMPUTE})
        front = selective_front(again, unit, alike(again))
        whole, parts = [c for c in front if not c.within], [c for c in front if c.within]
        assert len(whole) <= MOST_SETS and 1 <= len(parts) <= MOST_PARTS
        assert parts[0].within == (part,) and all(name.startswith(f"{part}.") for name in parts[0].keep)
        assert all(set(a.within) < set(b.within) for a, b in itertools.pairwise(parts))
        plain, first = tracer.trace({unit.name: SAVE}), tracer.trace({unit.name: parts[0]})

        def heavy(graph: Graph) -> int:
            return sum(op.phase == "recompute" and op.flops > 0 for op in graph.ops)

        assert first.peak_bytes < plain.peak_bytes and heavy(first) == 0 < heavy(again)


@pytest.mark.parametrize("model", [TWO_LAYERS, "gpt2-tiny"])
def test_remade_sets_free_ever_more(model: str) -> None:
    """From cheap ops of some parts to everything; nothing heavy runs again as long as all products are kept."""
    with Tracer.from_spec(WorkloadSpec(model=model, batch_size=2)) as tracer:
        unit = next(u for u in tracer.units if u.role == "block")
        front = remake_front(again := tracer.trace({unit.name: RECOMPUTE}), unit, alike(again))
        traced = {choice: tracer.trace({unit.name: choice}) for choice in front}
    heavy = {choice: sum(op.phase == "recompute" and op.flops > 0 for op in g.ops) for choice, g in traced.items()}
    assert all((heavy[choice] == 0) == (choice.keep == ("**",)) for choice in front)
    fewer = [choice for choice in front if not choice.within]
    assert fewer[0].keep == ("**",) and fewer[-1].keep == () and len(fewer) <= MOST_REMADE + 1
    assert [heavy[choice] for choice in fewer] == sorted(heavy.values())[len(front) - len(fewer) :]
    assert all(set(a.within) < set(b.within) for a, b in itertools.pairwise(front[: len(front) - len(fewer)]))
