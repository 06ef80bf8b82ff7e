"""What a shallow twin says about one block is what the whole model says."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from autockpt.cost import build_profile, uniform_graphs
from autockpt.cost.profile import head_graphs
from autockpt.cost.roofline import roofline_times
from autockpt.schema import SAVE, SearchSpace, WorkloadSpec
from autockpt.schema.choices import CHUNKED_SOFTMAX
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.tuning import shallow_twin as depth
from tests.tuning.small import llama_in

pytestmark = pytest.mark.slow

DEEP = 8


def t5_in(folder: Path) -> str:
    """The first block of each of its two stacks holds the positions."""
    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": depth.TWIN_BLOCKS + 1,
        "num_heads": 2,
    }
    transformers.T5Config(**sizes, architectures=["T5ForConditionalGeneration"]).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("made_in", "lora", "blocks", "kinds"),
    [
        (partial(llama_in, vocab_size=64, num_hidden_layers=DEEP), 4, depth.TWIN_BLOCKS, ("recompute", "offload")),
        (t5_in, None, 2 * depth.TWIN_BLOCKS, ("recompute",)),
    ],
    ids=["llama", "t5"],
)
def test_the_menus_are_those_of_the_whole_model(
    made_in: Any, lora: int | None, blocks: int, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "DEEP", DEEP)
    spec = WorkloadSpec(model=made_in(tmp_path), batch_size=2, seq_len=32, lora=lora)
    card, space = load_hardware("rtx4090"), SearchSpace().restricted(kinds)
    with ExitStack() as stack:
        tracer = stack.enter_context(Tracer.from_spec(spec, hardware=card))
        whole_blocks = [u for u in tracer.units if u.role == "block"]
        whole = uniform_graphs(tracer, whole_blocks, space.choices)
        opened = depth.open_twin(stack, spec, tracer, card)
        assert opened is not None
        twin, base = opened
        assert base == whole["save"][1]
        small_blocks = [u for u in twin.units if u.role == "block"]
        assert len(small_blocks) == blocks
        small = uniform_graphs(twin, small_blocks, space.choices)
        heads = [head_graphs(traces, tracer.head, [CHUNKED_SOFTMAX]) for traces in (twin, tracer)]
        graphs = [graph for _, graph in (*small.values(), *whole.values())]
        times = roofline_times(card, [*graphs, *(graph for runs in heads for _, graph in runs.values())])
        mine = depth.transplanted(build_profile(twin, times, small, heads=heads[0]), whole["save"][1], tracer)
        real = build_profile(tracer, times, whole, heads=heads[1])
        assert [m.representative for m in mine.profile.menus] == [m.representative for m in real.profile.menus]
        for menu, reference in zip(mine.profile.menus, real.profile.menus, strict=True):
            for item, other in zip(menu.items, reference.items, strict=True):
                assert (item.choice, item.kept_bytes) == (other.choice, other.kept_bytes)
                assert item.forward_seconds == pytest.approx(other.forward_seconds)
                assert item.recompute_seconds == pytest.approx(other.recompute_seconds)
                assert item.backward_seconds == pytest.approx(other.backward_seconds)
        assert {u.name for u in mine.problem(0).units} == {u.name for u in whole_blocks} | {"lm_head"}
        plan = {u.name: whole["recompute"][0][u.name] if i < 5 else SAVE for i, u in enumerate(whole_blocks)}
        assert mine.predictor.predict(plan) == real.predictor.predict(plan)
