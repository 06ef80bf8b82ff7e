"""What a forward changes of its modules is learned, and restored around a recomputation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autockpt.checkpointing import module_state
from autockpt.checkpointing.module_state import ModuleState
from autockpt.errors import ConflictError
from tests.errors import raises


class Counting(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.calls, self.notes = 0, [0]
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("constant", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.notes.append(self.calls)
        self.mean += 1
        return x * self.get_buffer("mean") * self.get_buffer("constant")


def learned(module: nn.Module, *, late: int = 0) -> tuple[ModuleState, list[module_state.Entry]]:
    state = ModuleState("unit", module)
    before = state.take_all()
    module(torch.ones(4))
    return state, state.learn(before, late=late)


def test_what_changed_is_restored_and_afterwards_as_it_was():
    module = Counting()
    state, entries = learned(module)
    mean, version, notes = module.mean, module.mean._version, module.notes
    module.eval()
    with state.restored(entries, [True]) as shared:
        assert (module.calls, module.notes, module.mean.tolist(), module.training) == (0, [0], [0] * 4, True)
        assert shared == {mean.untyped_storage()._cdata}
        module(torch.ones(4))
    assert (module.calls, module.notes, module.mean.tolist(), module.training) == (1, [0, 1], [1] * 4, False)
    assert module.mean is mean and module.mean._version == version and module.notes is notes


def test_only_what_changed_is_taken_from_then_on():
    state, _ = learned(Counting())
    assert {entry.name for entry in state.take()} == {"calls", "notes", "mean"}


def test_statistics_of_norms_are_taken_from_the_first_call_on():
    state = ModuleState("unit", norm := nn.BatchNorm1d(4))
    assert {entry.name for entry in state.take()} == set(norm._buffers)


def test_what_begins_to_count_between_checks_is_an_error():
    with raises(ConflictError, "unit."):
        learned(Counting(), late=7)


def test_a_large_buffer_changed_in_place_is_an_error(monkeypatch):
    monkeypatch.setattr(module_state, "COPIED_BYTES", 8)
    with raises(ConflictError, "unit.mean"):
        learned(Counting())
