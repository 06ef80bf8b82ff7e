"""What only running a forward a second time can get wrong."""

import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autockpt.checkpointing import module_state, replay_context
from autockpt.checkpointing.replay_context import recomputing
from autockpt.errors import ConflictError, InPlaceError, RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE
from tests.errors import raises
from tests.policies.zoo import Tally, Unit, assert_as_plain, assert_equal, on, trained


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


def rows() -> Tensor:
    return torch.randn(4, 8)


def as_plain(body: Callable[..., Any], call: Callable[..., Any] | None = None) -> None:
    assert_as_plain(partial(Model, body, call), CHOICES, rows)


def test_random_numbers_of_python_and_numpy():
    as_plain(lambda unit, x: (unit.linear(x) * random.random()).sigmoid())
    as_plain(lambda unit, x: (unit.linear(x) * float(np.random.rand())).sigmoid())
    as_plain(lambda unit, x: (unit.linear(x) * random.gauss(0, 1)).sigmoid())


class Pair(NamedTuple):
    first: Any
    second: Any


def test_every_way_of_passing_tensors():
    def body(unit, first=None, second=None, pair=(None, None), deep=None, flag=True, *, last):
        x = first if second is None else second
        cos, sin = pair
        return (unit.linear(x) * cos + sin).sigmoid() * deep["a"][0] + last

    def call(unit, x):
        pair = (x.sin(), x.cos())
        return unit(None, x, pair=pair, deep={"a": [x * 0.5, 3], "b": None}, last=x)

    as_plain(body, call)
    as_plain(body, lambda unit, x: unit(first=x, pair=(x, 2.0), deep={"a": (x,)}, last=1))
    as_plain(body, lambda unit, x: unit(x, pair=Pair(x, x), deep=OrderedDict(a=[x + 1]), last=torch.ones(8)))


def test_containers_are_new_and_a_tensor_that_is_given_twice_stays_one():
    def body(unit, x, notes, query, key):
        notes.append(len(notes))
        return unit.linear(x).sigmoid() * len(notes) * (query.sin() if query is key else query.cos())

    as_plain(body, lambda unit, x: unit(x, [1, None], x, x))


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


@pytest.mark.parametrize(
    "body",
    [
        lambda unit, x: unit.linear(torch.relu_(x)),
        lambda unit, x: (unit.linear(x.detach()).sum().backward(), unit.linear(x).sigmoid())[1],
    ],
    ids=["a changed input", "a backward inside"],
)
def test_what_cannot_run_again_is_refused_in_its_first_forward(body):
    model = Model(body)
    with attach(model, CHOICES), raises(ConflictError, "units.0", "save"):
        model(rows())


def test_inside_a_checkpoint_of_the_users_own():
    class Outer(Model):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    make = partial(Outer, lambda unit, x: torch.dropout(unit.linear(x).sigmoid(), 0.3, True))
    with pytest.warns(UserWarning, match=r"units\.0 runs inside of a torch\.utils\.checkpoint"):
        assert_as_plain(make, CHOICES, rows)


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

    assert_as_plain(make, CHOICES, rows)


def test_an_exception_in_backward_leaves_the_graph_usable(monkeypatch):
    def body(unit, x):
        return torch.sigmoid(unit.linear(x))

    model, x = Model(body), rows()
    wanted = torch.autograd.grad(model(x).sum(), model.units[0].linear.weight)
    with attach(model, CHOICES):
        loss = model(x).sum()
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(torch, "sigmoid", lambda _: 1 / 0)
            loss.backward(retain_graph=True)
        assert recomputing() is None
        model.zero_grad()
        loss.backward()
    assert torch.equal(model.units[0].linear.weight.grad, wanted[0])


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

    wanted = trained(partial(Hooked, body), {}, rows, 2)
    packed.clear()
    assert_equal(trained(partial(Hooked, body), CHOICES, rows, 2), wanted)
    assert packed == [torch.Size([4, 8])] * 4  # two units, two steps, nothing but the inputs


# --- errors of a second run, and what a forward does only once


class OfTheUsersOwn(Exception):
    pass


@pytest.mark.parametrize(
    "kind", [TimeoutError, MemoryError, OSError, OfTheUsersOwn, RuntimeError, torch.OutOfMemoryError]
)
def test_what_may_have_come_from_outside_is_raised_as_it_is(kind: type[Exception]):
    with pytest.raises(kind) as caught:
        interrupted(error := kind("now"))
    assert caught.value is error
    assert not isinstance(error, RuntimeError) or "units.1 ran again for backward" in "".join(error.__notes__)


@pytest.mark.parametrize("kind", [StopIteration, KeyError, AttributeError, AssertionError, TypeError, ValueError])
def test_what_a_changed_program_raises_names_the_unit(kind: type[Exception]):
    with raises(ConflictError, "units.1", kind.__name__):
        interrupted(kind())


def interrupted(error: Exception) -> None:
    """A second run is stopped by it."""

    def body(unit, x):
        if recomputing():
            raise error
        return unit.linear(x).sigmoid()

    model = Model(body)
    with attach(model, CHOICES):
        model(rows()).sum().backward()


def test_parameters_that_are_exchanged_for_the_forward_alone():
    def body(unit, x):
        return unit.linear(x).sigmoid().exp()

    def gradients(choices: dict[str, Any]) -> tuple[Tensor, ...]:
        model = Model(body)
        others = {name: (p * 2).detach().requires_grad_() for name, p in model.named_parameters()}
        with attach(model, choices):
            loss = torch.func.functional_call(model, others, (torch.ones(4, 8),)).sum()
            return torch.autograd.grad(loss, list(others.values()))

    assert all(map(torch.equal, gradients(CHOICES), gradients({})))


def test_another_number_of_saved_tensors_is_an_error():
    model = Model(lambda unit, x: unit.linear(x) if recomputing() else unit.linear(x).sigmoid().sin())
    with attach(model, CHOICES), raises(ConflictError, "units.1"):
        model(rows()).sum().backward()


def test_hooks_that_a_forward_registers_are_refused():
    def body(unit, x):
        unit.linear.register_forward_hook(lambda *_: None)
        return unit.linear(x).sigmoid()

    model = Model(body)
    with attach(model, CHOICES), raises(ConflictError, "units.0"):
        for _ in range(2):
            model(rows())


def test_hooks_and_modules_of_a_first_forward_are_made_once():
    def body(unit, x):
        if not hasattr(unit, "late"):
            unit.late = nn.Linear(8, 8)
            unit.linear.register_forward_hook(lambda *_: None)
        return unit.late(unit.linear(x).sigmoid()).sigmoid()

    as_plain(body)
    model = Model(body)
    with attach(model, CHOICES):
        for _ in range(3):
            model(rows()).sum().backward()
    assert all(len(unit.linear._forward_hooks) == 1 for unit in model.units)


def test_hooks_that_are_there_for_a_forward_alone():
    """Those before a module, which may hand it arguments as PEFT's do, run again; those that look at outputs do not."""
    seen = []

    def half(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0] / 2,), kwargs

    class Hooked(Model):
        def forward(self, x: Tensor) -> Tensor:
            first, second = (unit.linear for unit in self.units)
            before = first.register_forward_pre_hook(half, with_kwargs=True)
            after = second.register_forward_hook(lambda *_: seen.append(1))
            x = super().forward(x)
            before.remove()
            x = super().forward(x)
            after.remove()
            return x

    def body(unit: Any, x: Tensor) -> Tensor:
        return unit.linear(x).sigmoid()

    assert_as_plain(partial(Hooked, body), CHOICES, rows)
    seen.clear()
    model = Hooked(body)
    with attach(model, CHOICES):
        model(rows()).sum().backward()
    assert len(seen) == 2


def test_a_graph_that_is_being_captured_is_refused(monkeypatch):
    def read(places):
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")

    monkeypatch.setattr(replay_context, "TorchStates", read)
    model = Model(lambda unit, x: unit.linear(x).sigmoid())
    with attach(model, CHOICES), raises(ConflictError, "units.0"):
        model(rows())


def test_what_begins_to_count_between_checks_is_an_error():
    begun = Tally()

    def body(unit, x):
        unit.count += begun.calls > 4
        return unit.linear(x).sigmoid()

    model = Model(body)
    for unit in model.units:
        unit.count = 0
    with attach(model, CHOICES), raises(ConflictError, "units.0.count"):
        for begun.calls in range(12):
            model(rows()).sum().backward()


def test_a_module_inside_may_begin_to_train():
    def body(unit, x):
        unit.count += unit.linear.training
        return (unit.linear(x) * (unit.count + random.random() * unit.linear.training)).sigmoid()

    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        random.seed(0)
        model: Any = Model(body)
        with attach(model, choices):
            for step in range(8):
                for unit in model.units:
                    unit.count = getattr(unit, "count", 1)
                    unit.linear.train(step > 4)
                model(torch.ones(4, 8)).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert_equal(gradients(CHOICES), gradients({}))


def test_a_large_buffer_changed_in_place_is_an_error(monkeypatch):
    def body(unit, x):
        unit.linear.mean += 1
        return unit.linear(x).sigmoid() * unit.linear.mean

    model = Model(body)
    for module in (*model.units, *[unit.linear for unit in model.units]):  # the name says which of two alike it is
        module.register_buffer("mean", torch.zeros(8))
    monkeypatch.setattr(module_state, "COPIED_BYTES", 8)
    with attach(model, CHOICES), raises(ConflictError, "units.0.linear.mean"):
        model(rows())


# --- compiled


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
    def make() -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(Remembering())
        for module in model if layers else [model]:
            module.compile(backend="aot_eager")
        return model

    assert_as_plain(make, on("0", RECOMPUTE), rows, 3)
    torch._dynamo.reset()


@pytest.mark.slow
def test_dropout_compiled_with_a_backend_that_only_looks():
    def make(fullgraph: bool = False) -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)))
        return torch.compile(model, backend="eager", fullgraph=fullgraph)  # type: ignore[return-value]

    assert_as_plain(make, on("01", RECOMPUTE), rows, 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="autockpt's choice `recompute`"):
        trained(partial(make, True), on("01", RECOMPUTE), rows)
    torch._dynamo.reset()
