"""What only running a forward a second time can get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autockpt.checkpointing.replay_context import recomputing
from autockpt.errors import ConflictError, InPlaceError, RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE
from tests.errors import raises
from tests.policies.zoo import Unit, assert_equal


class Model(nn.Module):
    def __init__(self, body: Callable[..., Any], call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Unit(body) for _ in range(2))
        self.call = call or (lambda unit, x: unit(x))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = self.call(unit, x)
        return x


CHOICES = {"units.0": RECOMPUTE, "units.1": RECOMPUTE}


def run(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    seen: dict[str, Tensor] = {}
    for i in range(steps):
        x = torch.randn(4, 8).requires_grad_()
        model(x).pow(2).sum().backward()
        seen |= {f"{i} {n}": p.grad.clone() for n, p in model.named_parameters()}
        seen |= {f"{i} buffer {n}": b.clone() for n, b in model.named_buffers()}
        seen[f"{i} input"] = x.grad.clone()
        seen[f"{i} random"] = torch.tensor([random.random(), np.random.rand()])
    return seen


def assert_as_plain(make: Callable[[], nn.Module], choices: dict[str, Any] = CHOICES) -> None:
    wanted, model = run(make()), make()
    with attach(model, choices):
        assert_equal(run(model), wanted)


def test_random_numbers_of_python_and_numpy():
    assert_as_plain(lambda: Model(lambda unit, x: (unit.linear(x) * random.random()).sigmoid()))
    assert_as_plain(lambda: Model(lambda unit, x: (unit.linear(x) * float(np.random.rand())).sigmoid()))
    assert_as_plain(lambda: Model(lambda unit, x: (unit.linear(x) * random.gauss(0, 1)).sigmoid()))


def test_every_way_of_passing_tensors():
    def body(unit, first=None, second=None, pair=(None, None), deep=None, flag=True, *, last):
        x = first if second is None else second
        cos, sin = pair
        return (unit.linear(x) * cos + sin).sigmoid() * deep["a"][0] + last

    def call(unit, x):
        pair = (x.sin(), x.cos())
        return unit(None, x, pair=pair, deep={"a": [x * 0.5, 3], "b": None}, last=x)

    assert_as_plain(lambda: Model(body, call))
    assert_as_plain(lambda: Model(body, lambda unit, x: unit(first=x, pair=(x, 2.0), deep={"a": (x,)}, last=1)))


GIVEN: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda scale: scale,
    "nested": lambda scale: {"a": [scale]},
    "object": lambda scale: SimpleNamespace(scale=scale),
}
"""Ways of giving a unit a tensor."""


@pytest.mark.parametrize("by", ["position", "keyword"])
@pytest.mark.parametrize("how", GIVEN)
def test_a_changed_argument_is_an_error(how, by):
    def body(unit, x, given):
        factor = {"tensor": lambda: given, "nested": lambda: given["a"][0], "object": lambda: given.scale}[how]()
        return unit.linear(x).sigmoid() * factor

    scale = torch.rand(8)
    given = GIVEN[how](scale)
    model = Model(body, lambda unit, x: unit(x, given) if by == "position" else unit(x=x, given=given))
    with attach(model, CHOICES):
        loss = model(torch.randn(4, 8)).sum()
        scale.mul_(2)
        # tensors in objects of unknown classes are not held by the frame: what is recomputed from them is compared
        with pytest.raises(RerunMismatch if how == "object" else InPlaceError):
            loss.backward()


def test_an_input_changed_by_the_unit_is_refused_at_once():
    model = Model(lambda unit, x: unit.linear(torch.relu_(x)))
    with attach(model, CHOICES), raises(ConflictError, "units.0") as caught:
        model(torch.randn(4, 8))
    assert "save" in caught.value.remedy


def test_inside_a_checkpoint_of_the_users_own():
    class Outer(Model):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    with pytest.warns(UserWarning, match=r"units\.0 runs inside of a torch\.utils\.checkpoint"):
        assert_as_plain(lambda: Outer(lambda unit, x: torch.dropout(unit.linear(x).sigmoid(), 0.3, True)))


# --- what backward gets is what it would have got, or an error


def test_a_saved_tensor_that_the_unit_changes_is_an_error():
    def body(unit, x):
        y = unit.linear(x).sigmoid()
        z = y * unit.linear.weight.sum()
        y.add_(1)
        return z.sin() + y

    plain, model = Model(body), Model(body)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(torch.randn(4, 8)).sum().backward()
    with attach(model, CHOICES), raises(InPlaceError, "units.1"):
        model(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_taken_inside_the_unit(bias):
    def body(unit, x):
        with torch.enable_grad():
            y = unit.linear(x).sigmoid()
            (force,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return torch.dropout(y + force, 0.3, True)

    def make() -> Model:
        model = Model(body)
        for unit in model.units if not bias else ():
            unit.linear.bias = None
        return model

    assert_as_plain(make)


def test_an_exception_in_backward_leaves_the_graph_usable(monkeypatch):
    def body(unit, x):
        return torch.sigmoid(unit.linear(x))

    model, wanted = Model(body), run(Model(body), 1)
    with attach(model, CHOICES):
        torch.manual_seed(1)
        loss = model(torch.randn(4, 8).requires_grad_()).pow(2).sum()
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(torch, "sigmoid", lambda _: 1 / 0)
            loss.backward(retain_graph=True)
        assert recomputing() is None
        model.zero_grad()
        loss.backward()
    assert torch.equal(model.units[0].linear.weight.grad, wanted["0 units.0.linear.weight"])


def test_the_input_is_kept_in_the_way_of_what_is_around():
    """Saved-tensor hooks of the user's own, as ``save_on_cpu`` sets them, get it like any other saved tensor."""
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    class Hooked(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().forward(x)

    def body(unit, x):
        return unit.linear(x).sigmoid()

    wanted, model = run(Hooked(body)), Hooked(body)
    packed.clear()
    with attach(model, CHOICES):
        assert_equal(run(model), wanted)
    assert packed == [torch.Size([4, 8])] * 4  # two units, two steps, nothing but the inputs


class Remembering(nn.Module):
    """A unit that no compiler can take into a graph under a recompute: it changes what is outside of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return torch.tanh(self.linear(x * self.mean)) * (1 + 0.1 * self.calls)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [True, False])
def test_state_that_changes_in_a_unit_that_breaks_the_graph(layers: bool):
    def train(choices: dict[str, Any]) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = nn.Sequential(Remembering(), Remembering()), torch.randn(4, 8)
        for module in model if layers else [model]:
            module.compile(backend="aot_eager")
        with attach(model, choices):
            for _ in range(3):
                model(batch).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None] + list(model.buffers())

    assert all(map(torch.equal, train({"0": RECOMPUTE, "1": RECOMPUTE}), train({})))
    torch._dynamo.reset()


@pytest.mark.slow
def test_dropout_compiled_with_a_backend_that_only_looks():
    def train(choices: dict[str, Any], fullgraph: bool = False) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)))
        compiled: Any = torch.compile(model, backend="eager", fullgraph=fullgraph)
        with attach(model, choices):
            compiled(torch.randn(4, 8)).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    choices = {"0": RECOMPUTE, "1": RECOMPUTE}
    assert all(map(torch.equal, train(choices), train({})))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="autockpt's choice `recompute`"):
        train(choices, fullgraph=True)
    torch._dynamo.reset()
