"""Calls that go by recipes: gradients are plain training's, and what is dropped is what can be made again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autockpt.checkpointing import recorded_call
from autockpt.checkpointing.recipes import Step
from autockpt.checkpointing.recorded_call import RecordedCall
from autockpt.errors import RerunMismatch
from tests.checkpointing.recorded import Recorded
from tests.errors import raises
from tests.policies.zoo import bytes_alive_after

LARGE = 128 * 64 * 4  # bytes of an input


class Mlp(nn.Module):
    """Its ``scale`` is an attribute; ``then`` may do anything with what is in between."""

    def __init__(self, then: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.then, self.scale = nn.Linear(64, 256), nn.Linear(256, 64), then, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.then(F.silu(self.up(x)) * self.scale))


def gradients(model: nn.Module, length: int = 128, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(length, 64, requires_grad=True)
    return [g.clone() for g in torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]


def assert_steps_equal(layer: Callable[[], nn.Module], steps: int = 8, **options: Any) -> Recorded:
    plain, recorded = layer(), Recorded(layer(), **options)
    for step in range(steps):
        wanted, found = gradients(plain, seed=step), gradients(recorded, seed=step)
        assert all(map(torch.equal, wanted, found)), step
    return recorded


@pytest.mark.parametrize(("keeps", "kept"), [(False, 2 * LARGE), (True, 6 * LARGE)])
def test_recorded_calls_and_later_ones_keep_the_same(keeps: bool, kept: int) -> None:
    recorded = Recorded(Mlp(), keeps=lambda _: keeps)
    x = torch.randn(128, 64, requires_grad=True)
    plain = bytes_alive_after(lambda: recorded.layer(x))
    found = [bytes_alive_after(lambda: recorded(x)) for _ in range(8)]
    assert len(set(found)) == 1 and found[0] < kept < plain


def test_what_a_module_inside_is_given_may_be_all_that_is_kept() -> None:
    """A 16-bit residual of which autograd saves a cast to 32 bits."""

    class Normed(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            wide = h.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.out = Normed(), nn.Linear(64, 64).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm((x + torch.randn_like(x)).bfloat16()))

    recorded = assert_steps_equal(Residual, keeps=lambda _: True)
    (recipe,) = [s.recipe for s in recorded.unit.signatures.values()]
    assert recipe is not None and len(recipe.taps) == 1
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in recorded.modules())


def test_nothing_of_a_call_outlives_its_graph() -> None:
    def calls() -> int:
        return sum(type(found) is RecordedCall for found in gc.get_objects())

    recorded, x = Recorded(Mlp()), torch.randn(128, 64, requires_grad=True)
    gc.disable()
    try:
        for _ in range(8):
            out = recorded(x)
            assert calls() == 1
            del out
            assert not calls()
    finally:
        gc.enable()


def test_steps_that_several_tensors_need_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = list[int](), Step.run
    monkeypatch.setattr(Step, "run", lambda step, values: ran.append(id(step)) or run(step, values))
    recorded = Recorded(Mlp(lambda h: h.exp().sin().cos()))
    for _ in range(3):
        ran.clear()
        gradients(recorded)
        assert len(ran) == len(set(ran)) > 3


# Which calls are recorded, and what two recordings that differ mean.


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
