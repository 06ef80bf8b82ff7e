"""Sentinels where kernels run late: what is wrong is found, on side streams too, and nobody waits before the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.policies import fingerprints
from autockpt.runtime import Session, attach
from autockpt.schema.choices import parse_choice
from tests.standin.inside.scenarios import BLOCKS, DEVICE, SIDES, Block, Model, batch, on

standin = torch.get_device_module("standin")
SCHEDULES = ("lazy", "random:1", "copies-late", "compute-late")
_START = time.monotonic_ns()
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Unrepeatable(Block):
    """What it computes depends on how often it ran, and nothing that could be put back says how often that was."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (time.monotonic_ns() - _START) * 1e-12)


class Reads(torch.autograd.Function):
    """Its backward reads what it saved, and gives nobody a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.sin(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        ctx.saved_tensors[0].sum()


class Aside(nn.Module):
    """A unit whose stream nobody has a reason to wait for when backward ends, beside one on the present stream."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, device=DEVICE))
        self.unit = Reading()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        with on(SIDES[0]):
            x.record_stream(SIDES[0])
            aside = self.unit(x)
            loss = aside.sum()
        loss.record_stream(torch.accelerator.current_stream())  # type: ignore[union-attr]
        return loss + x.sum()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reads.apply(x)  # type: ignore[return-value]


def _model(block: type[Block] = Block, *streams: Any) -> Model:
    model = Model(block).to(DEVICE)
    model.streams = list(streams)
    return model


def _attached(model: nn.Module, kind: str) -> Session:
    units = [f"blocks.{n}" for n in range(BLOCKS)] if isinstance(model, Model) else ["unit"]
    return attach(model, {unit: parse_choice(kind) for unit in units}, sentinels="all")


@contextmanager
def alone_on(stream: Any) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@pytest.mark.parametrize("streams", ([], SIDES), ids=("one stream", "two streams"))
@pytest.mark.parametrize("kind", ("recompute", "recompute_offload"))
@each_schedule
def test_a_rerun_that_differs_is_found(schedule, kind, streams):
    standin.set_schedule(schedule)
    model = _model(Unrepeatable, *streams)
    with _attached(model, kind), pytest.raises(RerunMismatch, match=r"backward of blocks\.3"):
        model(batch()).backward()


@pytest.mark.parametrize("kind", ("recompute", "offload", "remake"))
@each_schedule
def test_what_is_right_is_proven(schedule, kind):
    standin.set_schedule(schedule)
    model = _model(Block, *SIDES)
    with _attached(model, kind) as session:
        for seed in range(2):
            model(batch(seed)).backward()
    for unit in session.proof().units.values():
        assert unit.checks == 2 and unit.tensors >= 6


@pytest.mark.parametrize("kind", ("recompute", "offload"))
@each_schedule
def test_a_stream_that_backward_does_not_wait_for(schedule, kind):
    standin.set_schedule(schedule)
    model = Aside()
    with _attached(model, kind) as session:
        for seed in range(2):
            model(batch(seed)).backward()
    assert session.proof().checks == 2


@pytest.mark.parametrize("kind", ("recompute", "remake"))
def test_the_host_waits_once_when_backward_has_ended(kind):
    model, x = _model(), batch().requires_grad_()
    with _attached(model, kind):
        for _ in range(3):  # the first are looked at closely
            model(x).backward()
        standin.synchronize()
        standin.set_schedule("lazy")
        begin = torch.accelerator.current_stream().record_event()
        waited: list[bool] = []
        x.register_hook(lambda _: waited.append(begin.query()))
        model(x).backward()
        assert waited == [False] and begin.query()


@each_schedule
def test_two_streams_that_wait_for_nobody(schedule, monkeypatch):
    monkeypatch.setattr(fingerprints, "_tables", {})
    standin.set_schedule(schedule)
    models, x = [_model() for _ in SIDES], batch()
    standin.synchronize()
    sessions = [_attached(model, "offload") for model in models]
    losses = []
    for model, stream in zip(models, SIDES, strict=True):
        with alone_on(stream):
            losses.append(model(x))
    for loss, stream in zip(losses, SIDES, strict=True):
        with alone_on(stream):
            loss.backward()
    assert all(session.proof().checks == BLOCKS for session in sessions)
