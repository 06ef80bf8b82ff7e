"""Models that are no plain stack of blocks: what there is to choose for, and what a traced step of it holds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import PlanError
from autockpt.runtime import choices_for
from autockpt.schema import Plan
from autockpt.schema.choices import RECOMPUTE, SAVE, parse_choice
from autockpt.schema.plan import NEVER_CALLED
from autockpt.tracing import Tracer
from autockpt.tuning.traced_model import blocks_of
from autockpt.workload import Step
from tests.policies.zoo import assert_equal
from tests.tracing.reference import Real
from tests.unrepeated import NAMED, gradients, one_block, recurrent, unet

CLOSE = 64  # bytes: numbers of no dimension


def made(make: Callable[[], Step], units: str | None = None) -> Step:
    torch.manual_seed(0)
    return replace(make(), units=units)


@pytest.mark.slow
@pytest.mark.parametrize("make", NAMED, ids=lambda make: make.__name__)
def test_named_modules_are_traced_and_trained_exactly(make: Callable[[], Step]) -> None:
    step = made(make, NAMED[make])
    kinds = ("recompute", "selective", "remake", "offload", "recompute_offload", "segment")
    with Tracer.from_step(step) as tracer:
        names = [unit.name for unit in tracer.units if unit.role == "block"]
        recomputed = dict.fromkeys(names, RECOMPUTE)
        graph = tracer.trace(recomputed)
    assert graph.source == "ghost"
    assert abs(graph.peak_bytes - Real(made(make), recomputed).peak_bytes) <= CLOSE
    plain = gradients(step, dict.fromkeys(names, SAVE))
    for kind in kinds:
        assert_equal(gradients(step, dict.fromkeys(names, parse_choice(kind))), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "cuts"),
    [(unet, "down1,down2,mid,up2,up1"), (recurrent, "lstm,gru,out"), (one_block, "block")],
)
def test_without_repeats_the_modules_that_keep_most_are_chosen(make: Callable[[], Step], cuts: str) -> None:
    with Tracer.from_step(made(make)) as tracer:
        assert tracer.settings["units"] == cuts
        assert [unit.name for unit in blocks_of(tracer)] == cuts.split(",")
        assert any("`units`" in note and cuts.split(",")[0] in note for note in tracer.notes)


def test_uncalled_blocks_are_named_and_need_no_choice() -> None:
    """As a vision tower that is trained on text alone."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
            self.tower = nn.ModuleList(block() for _ in range(2))
            self.layers = nn.ModuleList(block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    step = Step(Reader(), torch.ones(2, 4, 8), loss=lambda model, batch: model(batch).sum())
    with Tracer.from_step(step) as tracer:
        assert tracer.settings[NEVER_CALLED] == "tower.0-1"
        assert {unit.name for unit in blocks_of(tracer)} == {f"layers.{i}" for i in range(3)}
        plan = Plan.create({"layers.1": RECOMPUTE}, tracer.units, settings=tracer.settings)
        assert choices_for(step.model, plan) == {f"layers.{i}": RECOMPUTE if i == 1 else SAVE for i in range(3)} | {
            f"tower.{i}": SAVE for i in range(2)
        }
        silent = Plan.create({"layers.1": RECOMPUTE}, tracer.units)
    with pytest.raises(PlanError):
        choices_for(step.model, silent)
