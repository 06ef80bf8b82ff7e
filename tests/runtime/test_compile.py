"""torch.compile around attached choices: one graph where it can be, else an error that names the choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds, parse_choice
from tests.policies.zoo import CASES, assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

LLAMA = CASES["llama"]
NO_CACHE = {"use_cache": False}
# aot_eager runs the very kernels that eager mode runs, so gradients can be compared bit for bit
AOT: dict[str, Any] = {"backend": "aot_eager"}


def make() -> nn.Module:
    """Without dropout: compiled random numbers are others. Eager attention, which the CPU compiles bit for bit. Two
    layers, so that there is a neighbour; each further one only takes the compiler longer."""
    model = LLAMA.make().eval()
    model.model.layers = model.model.layers[:2]
    model.config._attn_implementation = "eager"
    return model


def run(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(**LLAMA.batch(), **NO_CACHE).loss.backward()
    return {n.replace("_orig_mod.", ""): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compiled(model: nn.Module, where: str, fullgraph: bool) -> nn.Module:
    if where == "whole":
        return torch.compile(model, fullgraph=fullgraph, **AOT)  # type: ignore[return-value]
    for layer in model.model.layers:  # type: ignore[reportGeneralTypeIssues]
        layer.compile(fullgraph=fullgraph, **AOT)
    return model


@pytest.fixture(scope="module")
def wanted() -> dict[str, Tensor]:
    return run(make())


@pytest.mark.parametrize("where", ["layers", "whole"])
@pytest.mark.parametrize("kind", sorted(set(choice_kinds("block")) - {"save"}))
@pytest.mark.filterwarnings("error:.*lru_cache:UserWarning")
def test_one_graph_or_an_error_with_the_choices_name(kind, where, wanted):
    model = compiled(make(), where, fullgraph=True)
    with attach(model, LLAMA.choices(model, parse_choice(kind))):
        try:
            assert_equal(run(model), wanted)
        except torch._dynamo.exc.Unsupported as error:
            assert kind != "recompute"
            assert f"`{kind}`" in str(error) and "without fullgraph=True" in str(error)
        else:
            return
    if where == "whole":
        return  # a model in a dozen graphs takes the compiler long; one layer breaks in the same places
    torch._dynamo.reset()
    model = compiled(make(), where, fullgraph=False)
    with attach(model, LLAMA.choices(model, parse_choice(kind))):
        assert_equal(run(model), wanted)
        assert_equal(run(model), wanted)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("kind", ["offload", "recompute_offload"])
def test_what_moves_is_not_compiled_for_every_layer_anew(kind):
    """Else torch gives up on layers beyond its limit, and these run eagerly."""

    def gradients(choose: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(6)))
        batch, found = torch.randn(256, 64), list[Tensor]()
        for layer in model:
            layer.compile(**AOT)
        with attach(model, {str(i): parse_choice(kind) for i in range(6)} if choose else {}):
            for _ in range(3):
                model.zero_grad()
                model(batch).square().mean().backward()
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    wanted = gradients(False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        got = gradients(True)
    assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))
