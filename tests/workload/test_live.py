"""Live objects become a workload untouched, or the mistake is named."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.workload import from_live, move


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
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
    w = from_live(model, torch.ones(2, 4), step=loss, optimizer=optimizer, accumulate=2, autocast="bf16")
    w.cycle()
    assert w.model is model and w.optimizer is optimizer and w.autocast is torch.bfloat16
    assert w.settings["optimizer"] == "SGD" and w.settings["batch_size"] == 2 and w.spec is None


def test_mappings_need_no_step() -> None:
    for batch in ({"x": torch.ones(2, 4)}, UserDict({"x": torch.ones(2, 4)})):
        assert from_live(WithLoss(), batch).forward_backward().shape == ()


def test_missing_loss_is_explained() -> None:
    with pytest.raises(WorkloadError, match=r"no loss, but dict\(logits\)(.|\n)*labels"):
        from_live(WithLoss(loss=False), {"x": torch.ones(2, 4)}).cycle()


def test_eval_mode_is_kept_and_said() -> None:
    model = net().eval()
    w = from_live(model, torch.ones(2, 4), step=loss)
    assert not model.training and "eval mode" in w.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "net"}, "the model is a str"),
        ({"step": None}, "batch is a Tensor"),
        ({"step": 3}, "step is a int"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": True}, "accumulate is True"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"autocast": "half"}, "autocast is 'half'"),
        ({"model": net().requires_grad_(False)}, "no parameter of the model requires gradients"),
        ({"optimizer": torch.optim.SGD(net().parameters())}, "no trainable parameter of this model"),
        ({"batch": torch.ones(2, 4, device="meta")}, "batch is on meta"),
        ({"full_step": lambda: None}, "both given"),
        ({"full_step": lambda: None, "step": None}, "without naming"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    given = {"model": net(), "batch": torch.ones(2, 4), "step": loss} | arguments
    with pytest.raises(WorkloadError, match=message):
        from_live(given.pop("model"), given.pop("batch"), **given)


def test_full_step_with_what_it_changes() -> None:
    ran: list[int] = []
    w = from_live(net(), None, full_step=lambda: ran.append(1), snapshot=(nn.Linear(1, 1),))
    w.cycle()
    assert ran == [1] and w.settings["optimizer"] == "full_step"


def test_moving_keeps_the_nesting() -> None:
    Pair = namedtuple("Pair", "a b")
    batch = OrderedDict(x=[torch.ones(1), "text"], y=(Pair(torch.ones(2), None),), z=UserDict(q=torch.ones(3)))
    moved = move(batch, torch.device("meta"))
    assert type(moved) is OrderedDict and type(moved["y"][0]) is Pair and type(moved["z"]) is UserDict
    assert {moved["x"][0].device.type, moved["y"][0].a.device.type, moved["z"]["q"].device.type} == {"meta"}
    assert moved["x"][1] == "text" and moved["y"][0].b is None
