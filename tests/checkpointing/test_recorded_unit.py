"""Which calls are recorded, and what two recordings that differ mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autockpt.checkpointing import recorded_call
from autockpt.checkpointing.recorded_call import RecordedCall
from autockpt.errors import RerunMismatch
from tests.checkpointing.recorded import Recorded
from tests.checkpointing.test_recorded_call import Mlp, gradients
from tests.errors import raises


def recorded_calls(model: Recorded, monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> list[int]:
    """The numbers of the calls that were recorded. Gradients of all are compared with plain training's."""
    noted, hold = list[int](), RecordedCall.hold
    monkeypatch.setattr(RecordedCall, "hold", lambda call, r, held, t: noted.append(number) or hold(call, r, held, t))
    for number, length in enumerate(lengths, 1):
        found = gradients(model, length, number)
        wanted = gradients(model.layer, length, number)
        assert all(map(torch.equal, wanted, found)), number
    return list(dict.fromkeys(noted))


def test_recordings_become_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded_calls(Recorded(Mlp()), monkeypatch, [8] * 40)
    assert found == [1, 2, 7, 16, 33]


def test_a_new_length_of_a_steady_unit_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [9, 9, *range(10, 40), *range(10, 40)]
    found = recorded_calls(Recorded(Mlp(), compares=False), monkeypatch, lengths)
    assert found == [1, 2, *range(3, 33)]


def test_lengths_of_long_ago_are_forgotten() -> None:
    recorded = Recorded(Mlp())
    for length in range(1, recorded_call._MOST + 10):
        gradients(recorded, length)
    assert len(recorded.unit.signatures) == recorded_call._MOST


def test_what_differs_from_the_first_on_is_always_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(100))
    model = Recorded(Mlp(lambda h: (h * (1 + next(runs) // 2)).sin()))  # one number for a call and its plain twin
    assert recorded_calls(model, monkeypatch, [8] * 12) == [*range(1, 13)]


@pytest.mark.parametrize("length", [8, 24])
def test_a_number_of_the_modules_own_may_change(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recorded(Mlp())
    recorded_calls(model, monkeypatch, [length] * 4)
    model.layer.scale = 0.5  # type: ignore[assignment]
    assert recorded_calls(model, monkeypatch, [length] * 4)[0] == 1


def test_a_counter_does_not_tell_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Mlp):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    assert len(recorded_calls(Recorded(Counting()), monkeypatch, [8] * 6)) == 3  # its first taught that it counts


def late(before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> tuple[Recorded, list[Any]]:
    now = [before]
    model = Recorded(Mlp(lambda h: now[0](h)))
    for _ in range(4):
        gradients(model)
    now[0] = after
    return model, now


def test_another_branch_is_found_by_the_next_recording() -> None:
    model, _ = late(torch.sigmoid, torch.tanh)
    with raises(RerunMismatch, "layer", "tanh"):
        for _ in range(recorded_call.RecordedUnit.gap + 1):
            gradients(model)


def test_what_saves_other_tensors_is_right_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = late(torch.sigmoid, lambda h: torch.tanh(h[:, :, None])[:, :, 0])
    assert recorded_calls(model, monkeypatch, [128] * 3)[0] == 2  # the first kept all from there on
