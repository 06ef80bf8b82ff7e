"""Modules that hold much and are no units are named."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autockpt.schema import SearchSpace
from autockpt.tracing import Tracer
from autockpt.tracing.cuts import left_out_notes
from autockpt.tuning.traced_model import trace_model
from autockpt.workload import Step

pytestmark = pytest.mark.slow

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Tagger(nn.Module):
    """Four equal blocks behind a sequence of layers and an LSTM, which hold more than they do."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.front = nn.Sequential(wide, nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.GELU())
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.front(x))
        for block in self.blocks:
            x = block(x)
        return x


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def tracer(units: str | None = None) -> Tracer:
    return Tracer.from_step(Step(Tagger(), torch.randn(8, 32, WIDTH), loss=squares, units=units))


@pytest.fixture(scope="module")
def plain() -> Iterator[Tracer]:
    with tracer() as made:
        yield made


def advised(said: str) -> str:
    found = re.search(r"`units: '([^']+)'`", said)
    assert found is not None
    return found[1]


def test_large_modules_outside_units_are_named_largest_first(plain: Tracer) -> None:
    assert "lstm" in plain.outside and "front" in plain.outside and "blocks.0" not in plain.outside
    (said,) = left_out_notes(plain.trace(), plain.outside)
    assert said.index("lstm ") < said.index("front ")
    assert advised(said) == "blocks.0-3,lstm,front"


@pytest.mark.parametrize("known", [False, True])
def test_logits_of_an_unknown_head_are_noted(known: bool) -> None:
    class Own(nn.Sequential):
        if known:

            def get_output_embeddings(self) -> nn.Module:
                return self[-1]

    model = Own(nn.Embedding(999, WIDTH), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 999))
    tokens = torch.zeros(64, dtype=torch.long)
    step = Step(model, tokens, loss=lambda model, batch: nn.functional.cross_entropy(model(batch), batch))
    with Tracer.from_step(step) as made:
        notes = trace_model(made, SearchSpace()).left_out
        assert trace_model(made, SearchSpace().restricted(("recompute",))).left_out == (), "no choice for it is wanted"
    assert any("get_output_embeddings" in note for note in notes) is not known


def test_who_follows_the_advice_hears_no_more_of_it(plain: Tracer) -> None:
    (said,) = trace_model(plain, SearchSpace().restricted(("save", "recompute"))).left_out
    with tracer(advised(said)) as named:
        found = trace_model(named, SearchSpace().restricted(("save", "recompute")))
    assert {unit.name for unit in found.plain.blocks()} >= {"front", "lstm", "blocks.0", "blocks.3"}
    assert found.left_out == () and said not in found.all_notes
