"""Casts of weights that autocast remembers, in forwards that run again."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autockpt.errors import RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds, from_label, parse_choice
from tests.policies.zoo import Calls

AGAIN = ["recompute", "recompute_offload", "selective", "keep_attention", "segment"]
Update = Callable[[nn.Module], None]


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def trained(kind: str, second: Update, *, inside: bool, begins: int = 0, sentinels: str = "off") -> list[Tensor]:
    """Gradients of steps that have two updates in a block of autocast each, from step ``begins`` on. ``inside``: the
    second backward runs in the block, too."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
    model, x = nn.Sequential(nn.Linear(16, 16), block, nn.Linear(16, 16)), torch.randn(64, 16)
    found = []

    def backward(loss: Tensor) -> None:
        loss.backward()
        found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        model.zero_grad()

    with attach(model, {"1": parse_choice(kind)}, sentinels=sentinels):  # type: ignore[arg-type]
        for step in range(begins + 2):
            with torch.autocast("cpu", torch.bfloat16):
                if step >= begins:
                    backward(model(x).square().mean())
                    second(model)
                loss = model(x).square().mean()
                if inside:
                    backward(loss)
            if not inside:
                backward(loss)
            update(model)
    return found


@pytest.mark.parametrize("begins", [0, 4])
@pytest.mark.parametrize("kind", AGAIN)
@pytest.mark.parametrize("inside", [False, True])
def test_of_weights_that_have_changed_since_they_are_refused(inside: bool, kind: str, begins: int) -> None:
    with pytest.raises(RerunMismatch):  # what is computed from the new casts is compared
        # where products are kept nothing else is computed from them: noticed in a checked call
        trained(kind, update, inside=inside, begins=begins, sentinels="all" if kind == "selective" else "sample")


def cleared(model: nn.Module) -> None:
    update(model)
    torch.clear_autocast_cache()


@pytest.mark.parametrize("second", [lambda model: None, cleared], ids=["no update", "cleared"])
@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_casts_of_weights_as_they_are_can_be_made_anew(kind: str, second: Update) -> None:
    assert all(map(torch.equal, trained("save", second, inside=False), trained(kind, second, inside=False)))


Steps = Callable[[nn.Module], list[Tensor]]


def with_and_without(
    kind: str, unit: nn.Module, steps: Steps, sentinels: Any = "off"
) -> tuple[list[Tensor], list[Tensor]]:
    """What steps give under plain training, and with the unit planned; on copies of it."""
    plain, planned = nn.ModuleList([deepcopy(unit)]), nn.ModuleList([deepcopy(unit)])
    wanted = steps(plain)
    with attach(planned, {"0": parse_choice(kind)}, sentinels=sentinels):
        return wanted, steps(planned)


def after(model: nn.Module, *more: Tensor) -> list[Tensor]:
    return [t.detach().clone() for t in (*more, *[p.grad for p in model.parameters() if p.grad is not None])]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def adversarial(model: nn.Module) -> list[Tensor]:
    """Steps on an input that each changes, in one block."""
    x, found = torch.ones(4, 8, requires_grad=True), []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model[0](x).float().square().sum().backward()  # type: ignore[index]
            assert x.grad is not None
            found += after(model, x.grad)
            with torch.no_grad():
                x.add_(x.grad.sign(), alpha=0.1)
    return found


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_changed_inputs_are_refused_where_they_are_cast_anew(kind: str) -> None:
    if kind in AGAIN:
        with pytest.raises(RerunMismatch):
            with_and_without(kind, mlp(), adversarial, sentinels="sample")
    else:
        assert all(map(torch.equal, *with_and_without(kind, mlp(), adversarial)))


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_inputs_that_no_cast_is_made_of_may_change(kind: str) -> None:
    """As those of most layers, which begin with a norm."""
    assert all(map(torch.equal, *with_and_without(kind, nn.Sequential(nn.LayerNorm(8), mlp()), adversarial)))


class CastsLate(nn.Module):
    """Casts what it is given from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.late = nn.LayerNorm(8), mlp(), False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if self.late else self.norm(x))


def cast_late(model: nn.Module) -> list[Tensor]:
    x, found = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_(), []
    with torch.autocast("cpu", torch.bfloat16):
        for model[0].late in (False, True):  # type: ignore[index, union-attr]
            model[0](x).float().square().sum().backward()  # type: ignore[index]
            found += after(model, x)
            update(nn.ParameterList([x]))
    return found


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_inputs_changed_before_their_cast_may_be_cast_anew(kind: str) -> None:
    assert all(map(torch.equal, *with_and_without(kind, CastsLate(), cast_late)))


def cleared_before_backward(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            loss = model[0](torch.ones(4, 8)).float().square().sum()  # type: ignore[index]
            torch.clear_autocast_cache()
            loss.backward()
            found += after(model, loss)
            update(model)
    return found


def in_a_block_of_another_type(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            first = model[0](torch.ones(4, 8)).float().square().sum()  # type: ignore[index]
        with torch.autocast("cpu", torch.float16):
            second = model[0](torch.ones(4, 8)).float().square().sum()  # type: ignore[index]
            first.backward()
        second.backward()
        found += after(model, first, second)
    return found


def before_an_update_of_its_block(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = model[0](torch.ones(4, 8)).float().square().sum()  # type: ignore[index]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
            update(model)
            loss = model[0](torch.ones(4, 8)).float().square().sum()  # type: ignore[index]
        found += after(model, loss)
    return found


class Own(nn.Module):
    """A unit with a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def with_blocks_of_its_own(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in range(3):
        loss = model[0](torch.ones(4, 8)).square().sum()  # type: ignore[index]
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
            update(model)
            found += after(model, loss, model[0](torch.ones(4, 8)))  # type: ignore[index]
    return found


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_nor_does_one_of_a_unit_with_a_block_of_its_own(kind: str) -> None:
    assert all(map(torch.equal, *with_and_without(kind, Own(), with_blocks_of_its_own)))


@pytest.mark.parametrize("steps", [cleared_before_backward, in_a_block_of_another_type, before_an_update_of_its_block])
@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_a_second_run_leaves_no_casts_to_other_forwards(kind: str, steps: Steps) -> None:
    assert all(map(torch.equal, *with_and_without(kind, mlp(), steps)))


def test_telling_blocks_apart_is_unseen_and_ends_no_block() -> None:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    model, saved = nn.Sequential(nn.Linear(4, 4)), list[tuple[int, ...]]()

    def cast() -> int:
        return nn.functional.linear(x, weight).grad_fn.next_functions[-1][0].next_functions[0][0]._sequence_nr()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    def steps() -> list[bool]:
        same = []
        with torch.autocast("cpu", torch.bfloat16):
            first = cast()
            torch.set_autocast_dtype("cpu", torch.float16)
            model(x).sum().backward()
            torch.set_autocast_dtype("cpu", torch.bfloat16)
            same.append(cast() == first)
        torch.set_autocast_enabled("cpu", True)  # outside of any block
        first = cast()
        model(x).sum().backward()
        same.append(cast() == first)
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
        return same

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        attach(model, {"0": from_label("recompute")}),
    ):
        assert steps() == [True, True]
    assert all(0 not in shape for shape in saved)


def test_autocast_of_another_device_does_not_reach_the_cpu() -> None:
    model, before = nn.Sequential(nn.Linear(4, 4)), torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_enabled("cuda", True)
    try:
        with attach(model, {"0": from_label("recompute")}):
            out = model(torch.randn(2, 4))
            out.sum().backward()
        after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), out.dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", before)
        torch.clear_autocast_cache()
    assert after == (False, torch.float16, torch.float32)


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.addmm, torch.matmul, nn.functional.linear)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Functions, partial(Calls, torch.ops.aten.addmm.default)], ids=["functions", "ops"])
@pytest.mark.parametrize("kind", [*AGAIN, "remake"])
def test_nor_by_modes_that_count_products(kind: str, mode: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with attach(model, {"0": parse_choice(kind)}), mode() as counts:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(2, 4))
    assert counts.count == 3
