"""One call: what it keeps until backward, and when it runs again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from autockpt.checkpointing import CheckpointedUnit, CheckpointFrame, replay_context
from autockpt.errors import ConflictError
from tests.errors import raises


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.dropout(self.linear(x).sigmoid(), 0.5, True).exp()


class Framed(nn.Module):
    """Runs a layer in frames, one for each call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0
        self.unit = CheckpointedUnit("layer", layer)

    def forward(self, x: Tensor) -> Tensor:
        def counted(*args: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(*args)

        return CheckpointFrame(self.unit, counted, (x,), {}).run((x,), {})


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.autograd.grad(model(x).sum() * 2, x)[0]


def test_nothing_of_a_call_outlives_its_graph():
    framed = Framed(Layer())
    gc.disable()
    try:
        x = torch.randn(3, 4)
        seen = weakref.ref(x.untyped_storage())
        out = framed(x)
        del x
        assert seen() is not None
        del out
        assert seen() is None
    finally:
        gc.enable()


def test_another_number_of_saved_tensors_is_an_error():
    class Alternating(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sin() if torch._C._current_graph_task_id() == -1 else self.linear(x)

    with raises(ConflictError, "layer"):
        Framed(Alternating())(torch.randn(3, 4)).sum().backward()


class Interrupted(Layer):
    """Its recomputation is stopped by this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if replay_context.recomputing():
            raise self.error
        return super().forward(x)


class OfTheUsersOwn(Exception):
    pass


@pytest.mark.parametrize("kind", [TimeoutError, MemoryError, OSError, OfTheUsersOwn, RuntimeError])
def test_what_may_have_come_from_outside_is_raised_as_it_is(kind: type[Exception]) -> None:
    error = kind("now")
    with pytest.raises(kind) as caught:
        Framed(Interrupted(error))(torch.randn(3, 4)).sum().backward()
    assert caught.value is error


@pytest.mark.parametrize("kind", [StopIteration, KeyError, AttributeError, AssertionError, TypeError, ValueError])
def test_what_a_changed_program_raises_names_the_unit(kind: type[Exception]) -> None:
    with raises(ConflictError, "layer", kind.__name__):
        Framed(Interrupted(kind()))(torch.randn(3, 4)).sum().backward()


def test_hooks_that_a_forward_registers_are_refused():
    class Hooking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.linear.register_forward_hook(lambda *_: None)
            return super().forward(x)

    framed = Framed(Hooking())
    framed(torch.randn(3, 4))
    with raises(ConflictError, "layer"):
        framed(torch.randn(3, 4))


def test_hooks_of_a_first_forward_are_installed_once():
    class Installing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if not getattr(self, "installed", False):
                self.installed = True
                self.linear.register_forward_hook(lambda *_: None)
            return super().forward(x)

    layer = Installing()
    framed = Framed(layer)
    for _ in range(3):
        framed(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert len(layer.linear._forward_hooks) == 1


def test_a_backward_inside_of_a_forward_is_refused():
    class Nested(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.linear(x.detach()).sum().backward()
            return super().forward(x)

    with raises(ConflictError):
        Framed(Nested())(torch.randn(3, 4))


def test_modules_that_a_forward_makes_run_again():
    class Growing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Linear(4, 4)
            return self.late(self.linear(x)).sigmoid()

    framed, x = Framed(Growing()), torch.randn(3, 4).requires_grad_()
    found = gradient(framed, x)
    assert torch.equal(found, gradient(framed.layer, x))


def test_a_graph_that_is_being_captured_is_refused(monkeypatch):
    def read(places):
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")

    monkeypatch.setattr(replay_context, "TorchStates", read)
    with raises(ConflictError, "layer"):
        Framed(Layer())(torch.randn(3, 4))
