"""Backward of several graphs in several threads at once: what one puts back for a second run is not another's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from autockpt.checkpointing import replay_context
from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds
from tests.errors import raises
from tests.policies.zoo import Row, assert_equal, on


def layers() -> nn.Module:
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
    return Row(layer, 4)


def gradients(kind: str) -> dict[str, Tensor]:
    model, seen, together = layers(), {}, threading.Barrier(2)
    parameters = list(model.parameters())

    def backward(loss: Tensor) -> tuple[Tensor, ...]:
        together.wait()
        return torch.autograd.grad(loss, parameters)

    with (
        attach(model, on([f"units.{i}" for i in range(4)], kind), sentinels="all"),
        ThreadPoolExecutor(2) as threads,
    ):
        for step in range(12):
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
