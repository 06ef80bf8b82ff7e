"""Backward of several graphs in several threads at once: what one restores for a recomputation is not another's."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing import replay_context
from autockpt.errors import AutockptError, ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds, parse_choice
from tests.errors import raises
from tests.policies.zoo import Row, assert_as_plain, assert_equal, on


def layers() -> nn.Module:
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
    return Row(layer, 4)


@functools.cache
def gradients(kind: str) -> dict[str, Tensor]:
    model, seen, together = layers(), {}, threading.Barrier(2)
    parameters = list(model.parameters())

    def backward(loss: Tensor) -> tuple[Tensor, ...]:
        together.wait()
        return torch.autograd.grad(loss, parameters)

    with attach(model, on([f"units.{i}" for i in range(4)], kind), sentinels="all"), ThreadPoolExecutor(2) as threads:
        for step in range(6):
            losses = [model(torch.randn(64, 64)).pow(2).mean() for _ in range(2)]
            for i, found in enumerate(threads.map(backward, losses)):
                seen |= {f"{step} {i} {place}": gradient for place, gradient in enumerate(found)}
    return seen | {"random state": torch.get_rng_state()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(choice_kinds("block")) - {"save", "compile_budget"}))
def test_two_threads_each_with_a_backward_of_its_own(kind):
    assert_equal(gradients(kind), gradients("save"))


def test_whoever_would_wait_for_ever_is_told(monkeypatch):
    monkeypatch.setattr(replay_context, "_PATIENCE", 0.05)
    model, held, over = layers(), threading.Event(), threading.Event()

    def another_unit_runs_again() -> None:
        with replay_context.one_at_a_time("another"):
            held.set()
            over.wait(60)

    with attach(model, on(["units.1"], "recompute")), ThreadPoolExecutor(1) as thread:
        loss = model(torch.randn(4, 64)).sum()
        thread.submit(another_unit_runs_again)
        held.wait()
        with raises(ConflictError, "units.1"):
            loss.backward(retain_graph=True)
        over.set()
        thread.shutdown()
        loss.backward()


def test_a_recording_holds_no_call_of_another_thread() -> None:
    inside, recorded = threading.Event(), threading.Event()

    class Meeting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not inside.is_set():
                inside.set()
                recorded.wait(60)
            elif not recorded.is_set():
                recorded.set()
                future.result()
            return super().forward(x).sin()

    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), Meeting(64, 64)))
    step = lambda: model(torch.randn(4, 64)).sum().backward()  # noqa: E731
    with attach(model, {"0": parse_choice({"kind": "remake", "within": ["1"]})}), ThreadPoolExecutor(1) as thread:
        future = thread.submit(step)
        inside.wait(60)
        step()


# --- experts stay those that forward chose: a recomputation whose ``topk`` breaks ties otherwise does not reroute


class OtherTies(TorchDispatchMode):
    """Of equal scores ``topk`` takes the last ones, where it takes the first ones elsewhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        values, places = func(args[0].flip(-1), *args[1:], **(kwargs or {}))
        return values, args[0].shape[-1] - 1 - places


class Experts(nn.Module):
    """A router whose scores are all equal, and experts."""

    def __init__(self, width: int = 32, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        nn.init.zeros_(self.router.weight)
        self.inner = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + torch.einsum("bk,bkij,bj->bi", weights, self.inner[chosen], x.tanh())


@pytest.mark.parametrize("kind", choice_kinds("block"))
def test_experts_are_those_that_forward_chose(kind: str) -> None:
    def backward(loss: Tensor) -> None:
        with OtherTies():
            loss.backward()

    make = lambda: nn.Sequential(*(Experts() for _ in range(4)))  # noqa: E731
    # checked calls and others
    assert_as_plain(make, on("0123", kind), lambda: torch.randn(16, 32), 6, backward=backward)


class Shuffles(nn.Linear):
    """Rows in an order that stands elsewhere."""

    order: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).index_select(0, Shuffles.order)


@pytest.mark.parametrize("kind", ["recompute", "segment"])
def test_indices_that_others_hold_are_not_written_over(kind: str) -> None:
    model = nn.Sequential(*(Shuffles(64, 64) for _ in range(2)))
    with attach(model, dict.fromkeys("01", parse_choice(kind))):
        Shuffles.order = torch.arange(8)
        loss = model(torch.randn(8, 64)).square().sum()
        Shuffles.order = torch.arange(8).flip(0)
        with pytest.raises(AutockptError):
            loss.backward()
    assert Shuffles.order.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
