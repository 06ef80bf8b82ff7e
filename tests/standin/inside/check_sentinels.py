"""Sentinels where kernels run late: what is wrong is found, on side streams too, and nobody waits before the end."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.checkpointing.fingerprint import fingerprint
from autockpt.errors import RerunMismatch
from autockpt.runtime import Session, attach
from autockpt.schema.choices import parse_choice
from tests.errors import raises
from tests.standin.inside.scenarios import ALL, BLOCKS, DEVICE, SIDES, Aside, Block, Model, batch

standin = torch.get_device_module("standin")
SCHEDULES = ("lazy", "random:1", "copies-late", "compute-late") if ALL else ("random:1",)
_START = time.monotonic_ns()
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Unrepeatable(Block):
    """What it computes depends on how often it ran, and nothing that could be restored says how often that was."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (time.monotonic_ns() - _START) * 1e-6)


def _model(block: type[Block] = Block, *streams: Any) -> Model:
    model = Model(block).to(DEVICE)
    model.streams = list(streams)
    return model


def _attached(model: nn.Module, kind: str) -> Session:
    return attach(model, {f"blocks.{n}": parse_choice(kind) for n in range(BLOCKS)}, sentinels="all")


@pytest.mark.parametrize("streams", ([], SIDES), ids=("one stream", "two streams"))
@pytest.mark.parametrize("kind", ("recompute", "recompute_offload"))
@each_schedule
def test_a_rerun_that_differs_is_found(schedule, kind, streams):
    standin.set_schedule(schedule)
    model = _model(Unrepeatable, *streams)
    with _attached(model, kind), raises(RerunMismatch, "blocks.3"):
        model(batch()).backward()


@pytest.mark.parametrize("kind", ("recompute", "offload", "remake"))
@each_schedule
def test_what_is_right_is_proven(schedule, kind):
    standin.set_schedule(schedule)
    model = _model(Block, *SIDES)
    with _attached(model, kind) as session:
        for seed in range(2):
            model(batch(seed)).backward()
    for unit in session.sentinels.units.values():
        assert unit.checks == 2 and unit.tensors >= 6


@pytest.mark.parametrize("kind", ("recompute", "offload"))
@each_schedule
def test_a_stream_that_backward_does_not_wait_for(schedule, kind):
    standin.set_schedule(schedule)
    model = _model(Aside, *SIDES)
    with _attached(model, kind) as session:
        for seed in range(2):
            model(batch(seed)).backward()
    assert session.sentinels.units["blocks.3"].checks == 2


@pytest.mark.parametrize("kind", ("recompute", "remake"))
@each_schedule
def test_a_write_before_backward_is_found_in_the_next_checked_call_and_nobody_waits_in_others(schedule, kind):
    model, x = _model(), batch()
    with attach(model, {f"blocks.{n}": parse_choice(kind) for n in range(BLOCKS)}):
        for _ in range(7):  # calls 1, 2, 4, 7 and 12 are checked
            model(x).backward()
        standin.synchronize()
        standin.set_schedule(schedule)
        before = _waits()
        for _ in range(4):
            _step_with_a_write(model, x)
        assert _waits() == before
        with raises(RerunMismatch, "blocks.3", "pass 12"):
            _step_with_a_write(model, x)


def _step_with_a_write(model: Model, x: Tensor) -> None:
    loss = model(x)
    for block in model.blocks:
        block.norm.bias.data.add_(0.5)
    loss.backward()


def _waits() -> int:
    return standin.extension.counts().get("host waits", 0)


@pytest.mark.parametrize("kind", ("recompute", "remake"))
def test_the_host_waits_once_when_backward_has_ended(kind):
    model, x = _model(), batch().requires_grad_()
    with _attached(model, kind):
        for _ in range(4):  # calls 1, 2 and 4 are looked at closely
            model(x).backward()
        standin.synchronize()
        standin.set_schedule("lazy")
        begin, before = torch.accelerator.current_stream().record_event(), _waits()
        waited: list[int] = []
        x.register_hook(lambda _: waited.append(_waits() - before))
        model(x).backward()
        assert waited == [0] and begin.query()


@pytest.mark.parametrize("kind", ("recompute", "recompute_offload"))
def test_the_host_waits_at_most_once_in_a_call(kind):
    """First calls look closely at parameters and buffers, large and small; later ones need no value of any."""

    model = Model(width=256).to(DEVICE)
    x = torch.randn(8, 256).to(DEVICE)
    fingerprint(x)  # the first of a process makes a table, and waits for it
    with attach(model, {f"blocks.{n}": parse_choice(kind) for n in range(BLOCKS)}, sentinels="off"):
        seen = []
        for _ in range(4):
            before = _waits()
            loss = model(x)
            between = _waits()
            loss.backward()
            seen.append((between - before, _waits() - between))
    assert all(forward <= BLOCKS and backward <= BLOCKS for forward, backward in seen), seen
    assert seen[-1] == (0, 0)
