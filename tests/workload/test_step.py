"""The cycle is what a careful hand-written loop does, bit for bit, and leaves nothing behind."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build


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


def workload(**more: Any) -> Step:
    torch.manual_seed(0)
    model = Net()
    defaults: dict[str, Any] = {"optimizer": torch.optim.AdamW(model.parameters())}
    loss = {} if "full_step" in more else {"loss": mean_loss}
    return Step(model, torch.randn(4, 8), **(defaults | loss | more))


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


def test_model_outputs_are_dead_when_backward_begins() -> None:
    w = build(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8))
    alive: list[weakref.ref] = []
    w.model.register_forward_hook(lambda _m, _a, output: alive.append(weakref.ref(output)))
    at_backward: list[bool] = []
    w.cycle(lambda phase: at_backward.append(alive[-1]() is None) if phase == "backward" else None)
    assert at_backward == [True]


@pytest.mark.parametrize(
    "result", [lambda model, batch: None, lambda model, batch: model(batch), lambda model, batch: batch.sum()]
)
def test_a_step_without_a_loss_is_explained(result: Any) -> None:
    w = workload()
    w.loss = result
    with pytest.raises(WorkloadError):
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


# --- what the user gives


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": "Net"},
        {"loss": None},
        {"accumulate": 0},
        {"autocast": torch.int8},
        {"model": Net().requires_grad_(False)},
        {"optimizer": torch.optim.SGD(Net().parameters())},
        {"optimizer": "adamw"},
        {"max_grad_norm": 0.0},
        {"units": ["0"]},
        {"batch": torch.ones(2, 8, device="meta")},
        {"full_step": lambda: None},
        {"full_step": lambda: None, "loss": None},
    ],
)
def test_mistakes(arguments: dict[str, Any]) -> None:
    given = {"model": Net(), "batch": torch.ones(2, 8), "loss": mean_loss} | arguments
    with pytest.raises(WorkloadError):
        Step(given.pop("model"), given.pop("batch"), **given)
