"""`selective` where the compiler makes one graph of a unit: what is kept, and that layers share their code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from autockpt.runtime import attach
from autockpt.schema.choices import KeepAttention, parse_choice

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

UNITS = ("layers.0", "layers.1", "layers.2")
PRODUCTS = 6  # of backward, of three linear layers
MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(16, 16)])
        self.mlp, self.norm = MLP(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.mlp(torch.sigmoid(self.inner[0](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(Layer() for _ in UNITS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def backend(products: list[int]) -> Callable[..., Any]:
    """Notes how many matrix products each backward has."""

    def forward(graph: Any, inputs: Any) -> Any:
        return graph

    def backward(graph: Any, inputs: Any) -> Any:
        products.append(sum(node.target in MATRIX_PRODUCTS for node in graph.graph.nodes))
        return graph

    made: Any = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
    )
    made._compiler_name = "noting"
    return made


def train(plan: Callable[[nn.Module], AbstractContextManager[Any]], compiler: Any, *, compile_first: bool) -> list:
    torch.manual_seed(0)
    model, batch, losses = Model(), torch.randn(4, 16), list[Tensor]()
    compiled = [layer.compile(backend=compiler, fullgraph=True) for layer in model.layers if compile_first]
    with plan(model):
        compiled += [layer.compile(backend=compiler, fullgraph=True) for layer in model.layers if not compile_first]
        for _ in range(2):
            losses.append(model(batch))
            losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize(
    ("keep", "again"), [(["**"], 0), (["mlp"], 1), (["mlp.up"], 2), (["inner.0"], 2), (["inner.0", "mlp.up"], 1)]
)
def test_what_is_kept_is_not_computed_again(keep: list[str], again: int, compile_first: bool) -> None:
    """Three layers are one graph."""
    choice, products = parse_choice({"kind": "selective", "keep": keep}), list[int]()
    train(lambda m: attach(m, dict.fromkeys(UNITS, choice)), backend(products), compile_first=compile_first)
    assert products == [PRODUCTS + again]


@pytest.mark.parametrize("choice", [parse_choice("selective"), KeepAttention()], ids=str)
def test_gradients_are_those_of_compiled_steps(choice: Any) -> None:
    def plan(choices: dict[str, Any]) -> Callable[[nn.Module], AbstractContextManager[Any]]:
        return lambda model: attach(model, choices)

    wanted = train(plan({}), "aot_eager", compile_first=True)
    for compile_first in (True, False):
        found = train(plan(dict.fromkeys(UNITS, choice)), "aot_eager", compile_first=compile_first)
        assert all(map(torch.equal, found, wanted))


def test_scopes_stay_off_where_a_plan_is_put_back() -> None:
    torch.manual_seed(0)
    model, products = Model(), list[int]()
    session = attach(model, dict.fromkeys(UNITS, parse_choice({"kind": "selective", "keep": ["mlp.up"]})))
    compiler = backend(products)
    for layer in model.layers:
        layer.compile(backend=compiler, fullgraph=True)
    model(torch.randn(4, 16)).backward()
    session.set_aside()
    with session.for_now():
        model(torch.randn(4, 16)).backward()
    session.remove()
    assert products == [PRODUCTS + 2]
    assert not any("forward" in module.__dict__ for module in model.modules())
