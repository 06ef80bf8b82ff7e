"""Casts of weights that autocast remembers, in forwards that run again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import choice_kinds, from_label, parse_choice

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
def test_of_weights_that_have_changed_since_they_are_refused_where_they_would_be_made_anew(
    kind: str, begins: int
) -> None:
    with pytest.raises(ConflictError, match="1 computed with casts of weights from before these were changed"):
        trained(kind, update, inside=False, begins=begins)


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_in_the_same_block_they_are_remembered_for_the_second_run_too(kind: str) -> None:
    assert all(map(torch.equal, trained("save", update, inside=True), trained(kind, update, inside=True)))


def cleared(model: nn.Module) -> None:
    update(model)
    torch.clear_autocast_cache()


@pytest.mark.parametrize("second", [lambda model: None, cleared], ids=["no update", "cleared"])
@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
def test_casts_of_weights_as_they_are_can_be_made_anew(kind: str, second: Update) -> None:
    assert all(map(torch.equal, trained("save", second, inside=False), trained(kind, second, inside=False)))


def test_telling_blocks_apart_is_seen_by_nobody_and_ends_no_block() -> None:
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
