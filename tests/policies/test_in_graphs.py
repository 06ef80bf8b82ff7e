"""Where the compiler makes one graph of a unit: what `selective` keeps, and what a forward changes in place."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from autockpt.runtime import attach
from autockpt.schema.choices import KeepAttention, parse_choice
from tests.policies.zoo import Row, assert_as_plain, on, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

UNITS = ("layers.0", "layers.1", "layers.2")
PRODUCTS = 6  # of backward, of three linear layers
MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(16, 16)])
        self.mlp = nn.Sequential(OrderedDict(up=nn.Linear(16, 32), tanh=nn.Tanh(), down=nn.Linear(32, 16)))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.mlp(torch.sigmoid(self.inner[0](x))))


def three_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(16, 16), layers=nn.Sequential(*(Layer() for _ in UNITS))))


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
    model, batch, losses = three_layers(), torch.randn(4, 16), list[Tensor]()
    compiled = [layer.compile(backend=compiler, fullgraph=True) for layer in model.layers if compile_first]
    with plan(model):
        compiled += [layer.compile(backend=compiler, fullgraph=True) for layer in model.layers if not compile_first]
        for _ in range(2):
            losses.append(model(batch).square().mean())
            losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("keep", "again"), [(["**"], 0), (["mlp"], 1), (["mlp.up"], 2), (["inner.0"], 2), (["inner.0", "mlp.up"], 1)]
)
def test_what_is_kept_is_not_computed_again(keep: list[str], again: int) -> None:
    """Three layers are one graph."""
    choice, products = parse_choice({"kind": "selective", "keep": keep}), list[int]()
    train(lambda m: attach(m, dict.fromkeys(UNITS, choice)), backend(products), compile_first=again == 2)
    assert products == [PRODUCTS + again]


@pytest.mark.parametrize("choice", [parse_choice("selective"), KeepAttention()], ids=str)
def test_gradients_are_those_of_compiled_steps(choice: Any) -> None:
    def plan(choices: dict[str, Any]) -> Callable[[nn.Module], AbstractContextManager[Any]]:
        return lambda model: attach(model, choices)

    wanted = train(plan({}), "aot_eager", compile_first=True)
    for compile_first in (True, False):
        found = train(plan(dict.fromkeys(UNITS, choice)), "aot_eager", compile_first=compile_first)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("keep", "again"), [(["mlp.up"], 2), (["**"], 0)])
def test_scopes_stay_off_where_a_plan_is_reattached(keep: list[str], again: int) -> None:
    model, products = three_layers(), list[int]()
    for layer in model.layers:
        layer.own = nn.Parameter(torch.ones(16, 16))  # with ** its layer is a scope itself
    session = attach(model, dict.fromkeys(UNITS, parse_choice({"kind": "selective", "keep": keep})))
    compiler = backend(products)
    for layer in model.layers:
        layer.compile(backend=compiler, fullgraph=True)
    model(torch.randn(4, 16)).square().mean().backward()
    session.remove()
    with session.reattach():
        model(torch.randn(4, 16)).square().mean().backward()
    session.remove()
    assert products == [PRODUCTS + again]
    assert not any("forward" in module.__dict__ for module in model.modules())


# --- what forward changes in place, where a compiler makes forward and backward of one graph and parts it again


class Writing(nn.Module):
    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(16) if kind == "batch norm" else nn.Identity()
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "buffer":
                self.mean.mul_(0.5).add_(x.detach().mean(0))
            case "view of a buffer":
                self.mean.view(4, 4)[0].add_(x.detach().mean())
            case "data of a buffer":
                self.mean.data = self.mean.data * 0.5 + x.detach().mean(0)
            case "input":
                x.mul_(1.5)
            case "weight":
                self.down.weight.data.mul_(0.9)
        return x + self.norm(self.down(torch.tanh(self.up(x * self.mean))))


class Scaled(nn.Module):
    """What is given to the layers is no leaf, so that they may write to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


KINDS = ["buffer", "view of a buffer", "data of a buffer", "input", "weight", "batch norm"]


WRITING = ("1.units.0",)


def model(kind: str, backend: str) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(nn.Sequential(Scaled(), Row(lambda: Writing(kind), 1)), fullgraph=True, backend=backend)  # type: ignore[return-value]


def rows() -> Tensor:
    return torch.randn(8, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_reads_what_forward_read(kind: str):
    assert_as_plain(partial(model, kind, "aot_eager"), on(WRITING, "recompute"), rows, 2)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"data of a buffer"}))  # which that compiler cannot take
def test_a_compile_budget_reads_that_and_leaves_no_setting_behind(kind: str):
    before = config.joint_custom_pass, config.activation_memory_budget
    make = partial(model, kind, "aot_eager_decomp_partition")
    got = trained(make, on(WRITING, "compile_budget"), rows, 2)
    assert (config.joint_custom_pass, config.activation_memory_budget) == before
    torch.testing.assert_close(got, trained(make, {}, rows, 2))
