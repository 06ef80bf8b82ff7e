"""The cycle is what a careful hand-written loop does, bit for bit, and leaves nothing behind."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Workload, build


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def workload(**more: Any) -> Workload:
    torch.manual_seed(0)
    model = Net()
    defaults: dict[str, Any] = {"optimizer": torch.optim.AdamW(model.parameters())}
    return Workload(model, torch.randn(4, 8), mean_loss, **(defaults | more))


def test_phases_are_announced_as_they_begin() -> None:
    seen: list[str] = []
    workload(accumulate=2).cycle(seen.append)
    assert seen == ["forward", "backward", "forward", "backward", "optimizer"]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_cycle_equals_a_hand_written_loop(autocast: torch.dtype | None, scaled: bool) -> None:
    w = workload(accumulate=3, max_grad_norm=0.1, autocast=autocast)
    if scaled:
        w.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = copy.deepcopy(w.model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)

    torch.manual_seed(7)
    for _ in range(2):
        w.cycle()
    torch.manual_seed(7)
    for _ in range(2):
        for _ in range(3):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = mean_loss(model, w.batch)
            scaler.scale(loss / 3).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for mine, theirs in zip(w.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_no_gradient_is_alive_after_a_cycle() -> None:
    for w in (workload(), workload(optimizer=None)):
        w.cycle()
        assert all(p.grad is None for p in w.model.parameters())


def test_without_an_optimizer_weights_stay() -> None:
    w = workload(optimizer=None, max_grad_norm=1.0)
    before = copy.deepcopy(w.model.state_dict())
    w.cycle()
    assert all(torch.equal(before[name], value) for name, value in w.model.state_dict().items())


def test_forward_backward_gives_a_detached_loss_and_keeps_gradients() -> None:
    w = workload()
    w.model.eval()
    loss = w.forward_backward()
    once = {n: p.grad.clone() for n, p in w.model.named_parameters() if p.grad is not None}
    w.forward_backward()
    assert not loss.requires_grad and set(once) == {n for n, _ in w.model.named_parameters()}
    for name, p in w.model.named_parameters():
        assert p.grad is not None and torch.equal(p.grad, 2 * once[name])


def test_model_outputs_are_dead_when_backward_begins() -> None:
    w = build(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8))
    alive: list[weakref.ref] = []
    w.model.register_forward_hook(lambda _m, _a, output: alive.append(weakref.ref(output)))
    at_backward: list[bool] = []
    w.cycle(lambda phase: at_backward.append(alive[-1]() is None) if phase == "backward" else None)
    assert at_backward == [True]


def test_full_step_replaces_the_cycle() -> None:
    calls, seen = [], []
    workload(full_step=lambda: calls.append(1)).cycle(seen.append)
    assert calls == [1] and seen == ["forward"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda model, batch: None, "NoneType, not a loss"),
        (lambda model, batch: model(batch), "not a single loss value"),
        (lambda model, batch: batch.sum(), "does not depend on any trainable parameter"),
    ],
)
def test_a_step_without_a_loss_is_explained(result: Any, message: str) -> None:
    w = workload()
    w.step = result
    with pytest.raises(WorkloadError, match=message):
        w.cycle()


def test_resident_bytes_are_weights_batch_and_optimizer_states() -> None:
    w = workload()
    weights = sum(p.numel() * 4 for p in w.model.parameters())
    assert w.resident_bytes() == weights + 4 * 8 * 4
    w.cycle()
    steps = 4 * len(list(w.model.parameters()))  # AdamW counts steps in one float per parameter
    assert w.resident_bytes() == 3 * weights + 4 * 8 * 4 + steps
    w.cycle()
    assert w.resident_bytes() == 3 * weights + 4 * 8 * 4 + steps


def test_snapshot_objects_count_as_resident() -> None:
    w = workload(snapshot=(nn.Linear(16, 16, bias=False),))
    assert w.resident_bytes() == workload().resident_bytes() + 16 * 16 * 4
