"""The cycle is what a careful hand-written loop does, bit for bit, and leaves nothing behind."""

from __future__ import annotations

import copy
import json
import weakref
from collections import UserDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build, ddp_of


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
    w.loss = result
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


# --- what the user gives


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def average(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).mean()


class WithLoss(nn.Module):
    def __init__(self, loss: bool = True) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 1), loss

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"loss": y.mean(), "y": y} if self.loss else {"logits": y}


def test_any_batch_with_a_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    w = Step(model, torch.ones(2, 4), loss=average, optimizer=optimizer, accumulate=2, autocast="bf16")
    w.cycle()
    assert w.model is model and w.optimizer is optimizer and w.autocast is torch.bfloat16
    assert w.settings["optimizer"] == "SGD" and w.settings["batch_size"] == 2 and w.spec is None
    fused = replace(w, optimizer=torch.optim.AdamW(w.model.parameters(), fused=True), settings={})
    assert fused.settings["optimizer"] == "AdamW (fused)"


def test_mappings_need_no_step() -> None:
    for batch in ({"x": torch.ones(2, 4)}, UserDict({"x": torch.ones(2, 4)})):
        assert Step(WithLoss(), batch).forward_backward().shape == ()


def test_missing_loss_is_explained() -> None:
    with pytest.raises(WorkloadError, match=r"no loss, but dict\(logits\)(.|\n)*labels"):
        Step(WithLoss(loss=False), {"x": torch.ones(2, 4)}).cycle()


def test_eval_mode_is_kept_and_said() -> None:
    model = net().eval()
    w = Step(model, torch.ones(2, 4), loss=average)
    assert not model.training and "eval mode" in w.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "net"}, "the model is a str"),
        ({"loss": None}, "batch is a Tensor"),
        ({"loss": 3}, "loss is a int"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": True}, "accumulate is True"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"units": 3}, "units is 3"),
        ({"scaler": 3}, "the scaler is a int"),
        ({"autocast": torch.int8}, "autocast is torch.int8"),
        ({"autocast": "half"}, "autocast is 'half'"),
        ({"model": net().requires_grad_(False)}, "no parameter of the model requires gradients"),
        ({"optimizer": torch.optim.SGD(net().parameters())}, "no trainable parameter of this model"),
        ({"optimizer": "adamw"}, "the optimizer is a str"),
        ({"optimizer": torch.optim.AdamW}, "the optimizer is the class AdamW"),
        ({"optimizer": []}, r"the optimizer is a list(.|\n)*full_step=one_cycle, snapshot="),
        ({"batch": torch.ones(2, 4, device="meta")}, "batch is on meta"),
        ({"full_step": lambda: None}, "both given"),
        ({"full_step": lambda: None, "loss": None}, "without naming"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    given = {"model": net(), "batch": torch.ones(2, 4), "loss": average} | arguments
    with pytest.raises(WorkloadError, match=message):
        Step(given.pop("model"), given.pop("batch"), **given)


def test_full_step_with_what_it_changes() -> None:
    ran: list[int] = []
    w = Step(net(), None, full_step=lambda: ran.append(1), snapshot=(nn.Linear(1, 1),))
    w.cycle()
    assert ran == [1] and w.settings["optimizer"] == "full_step"


# --- facts for people and files


def test_a_built_workload() -> None:
    settings = build(WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=16, accumulate=3, autocast="bf16")).settings
    expected = {
        "model": "llama-tiny",
        "architecture": "LlamaForCausalLM",
        "params": 250_432,
        "trainable_params": 250_432,
        "dtype": "fp32",
        "autocast": "bf16",
        "batch_size": 2,
        "seq_len": 16,
        "tokens": 96,
        "accumulate": 3,
        "optimizer": "AdamW",
        "attention": "sdpa",
        "device": "cpu",
    }
    assert expected.items() <= settings.items()
    json.dumps(settings)


@pytest.mark.parametrize(("views", "says"), [(False, "buckets"), (True, None)])
def test_a_model_under_ddp_has_buckets_unless_gradients_are_views_of_them(views: bool, says: str | None) -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    wrapped.__dict__["gradient_as_bucket_view"] = views
    assert ddp_of(wrapped) == says and ddp_of(nn.Linear(1, 1)) is None


def test_the_weights_type_is_that_of_most_numbers() -> None:
    model = nn.Sequential(nn.Linear(100, 100, dtype=torch.bfloat16), nn.LayerNorm(100))
    settings = Step(model, torch.ones(5, 100), loss=lambda m, b: m(b).sum()).settings
    assert settings["dtype"] == "bf16" and settings["batch_size"] == 5
    assert settings["seq_len"] is None and settings["tokens"] is None and settings["optimizer"] == "none"


def test_a_notebook_shows_what_is_trained_and_no_weights() -> None:
    said = repr(workload(accumulate=2))
    assert "accumulate=2" in said and "tensor(" not in said and len(said) < 400
